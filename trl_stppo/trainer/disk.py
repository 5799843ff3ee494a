"""A run's output directory: checkpoints written completely or not at all, by one run at a time.

A checkpoint is written into a staging folder, described by a manifest, flushed to the disk and then
renamed. A folder named `checkpoint-<step>` is never half written. The next process completes or deletes
the remains of a killed process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import CheckpointError, CheckpointWriteError, RunLockError

# Bytes per read.
_BLOCK = 1 << 18
logger = logging.getLogger(__name__)

# Seconds for a killed process to close its files.
DYING = 2.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
# These names lie in the output directory, because renaming is atomic only on one disk. Upstream does not
# upload names that begin with an underscore.
STAGING, TRASH, LOCK = "_incomplete", "_deleted", "_running.txt"
# What a manifest says of its checkpoint: the run, and the files with their checksums.
Manifest = dict[str, Any]
MANIFEST = "stppo_checkpoint.json"
# A file of a checkpoint that stays on this machine, because it has the user's tokens.
LOCAL = "training_args.bin"
FORMAT = 3
_NAME = re.compile(r"checkpoint-\d+")


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder, or only the link if `path` is a link; ignore errors."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def checksum(path: Path) -> str:
    """Return a file's CRC-32, as hex digits; it detects damage and mix-ups, not forgery."""
    value, block = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(block[:count], value)
    return f"{value:08x}"


def seal(folder: Path, about: Manifest) -> None:
    """Write the manifest of a complete folder, and flush all files to the disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    # A copy from the Hub has the manifest's files only.
    needed = [p for p in files if p.name != LOCAL]
    sums = {p.relative_to(folder).as_posix(): checksum(p) for p in needed}
    manifest = {"format": FORMAT, **about, "files": sums}
    for path in files:
        flush(path)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    flush(folder / MANIFEST)


def publish(staged: Path, final: Path) -> None:
    """Move a folder with a manifest to its final place, and replace an older folder there."""
    if os.path.lexists(final):
        discard(final)
    os.replace(staged, final)
    remove(staged.parent)
    flush(final.parent)


def discard(folder: Path) -> None:
    """Delete a checkpoint: rename it first, so that a kill leaves no half-deleted checkpoint."""
    trash = folder.parent / TRASH
    remove(trash)
    os.replace(folder, trash)
    remove(trash)


def tidy(run_dir: Path) -> None:
    """Publish the complete staged checkpoints of a killed process, and delete its other remains."""
    staged = (run_dir / STAGING).glob("checkpoint-*")
    for folder in [folder for folder in staged if complaint(folder) is None]:
        publish(folder, run_dir / folder.name)
    remove(run_dir / STAGING)
    remove(run_dir / TRASH)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(
            f"`resume_from_checkpoint={str(folder)!r}` is not a folder; allowed: a checkpoint's, or True."
        )
    if not path.is_file():
        raise CheckpointError(f"`{folder}` has no {MANIFEST}: it is incomplete, or another trainer wrote it.")
    try:
        manifest: Manifest = json.loads(path.read_text(encoding="utf-8"))
        written = manifest["format"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(f"`{path}` is damaged ({error}). Resume from another checkpoint.") from error
    if written != FORMAT:
        raise CheckpointError(f"`{path}` has format {written!r}; this version reads {FORMAT}.")
    return manifest


def complaint(folder: Path) -> str | None:
    """Return a description of a checkpoint's damage, or None."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, written in manifest["files"].items():
        if not (folder / name).is_file():
            return f"`{folder}` lacks the file {name!r}, which was there when it was written."
        try:
            now = checksum(folder / name)
        except OSError as error:
            return f"`{folder}` cannot be read ({error}). Resume from another checkpoint."
        if now != written:
            return f"`{folder / name}` has changed since it was written: CRC-32 {now}, not {written}."
    return None


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first; folders without a valid manifest come at the beginning.

    They are sorted by the order of writing, not by step: after a run has gone back to an older
    checkpoint, the checkpoints of the abandoned branch have higher steps.
    """
    if not run_dir.is_dir():
        return []
    found = sorted(run_dir.iterdir())
    return sorted((p for p in found if p.is_dir() and _NAME.fullmatch(p.name)), key=_order)


def _order(folder: Path) -> int:
    """Return a checkpoint's place in the order of writing; -1 without a valid manifest."""
    try:
        order: int = read_manifest(folder)["order"]
    except CheckpointError:
        return -1
    return order


def next_order(run_dir: Path) -> int:
    """Return the order number of a new checkpoint: the newest checkpoint's number plus 1."""
    return 1 + max(map(_order, checkpoints(run_dir)), default=0)


def last_complete(run_dir: Path, wanted: str | bool = True) -> Path:
    """Return the newest complete checkpoint; errors quote `wanted`."""
    found = checkpoints(run_dir)
    # A folder without a valid manifest may be the newest, so it comes first.
    ageless = [folder for folder in found if _order(folder) < 0]
    complaints: list[str] = []
    for folder in [*ageless, *reversed(found[len(ageless) :])]:
        problem = complaint(folder)
        if problem is None:
            if complaints:
                logger.warning("Resuming from %s. Passed over: %s", folder, " ".join(complaints))
            return folder
        complaints.append(problem)
    raise CheckpointError(
        f"`resume_from_checkpoint={wanted!r}`, but `{run_dir}` holds no checkpoint to resume from"
        + (": " + " ".join(complaints) if complaints else ". Start without it, or pass a path.")
    )


def to_resume(run_dir: Path, wanted: str | bool | None) -> Path | None:
    """Find the checkpoint for `resume_from_checkpoint=wanted`; return None for a new run."""
    if not wanted or (wanted == "auto" and not checkpoints(run_dir)):
        return None
    if wanted is True or wanted == "auto":
        return last_complete(run_dir, wanted)
    folder = Path(wanted)
    # A name in the output directory is allowed too, such as the Hub's "last-checkpoint".
    if not folder.is_dir() and (run_dir / wanted).is_dir():
        folder = run_dir / wanted
    if (problem := complaint(folder)) is not None:
        raise CheckpointError(problem)
    return folder


def prune(run_dir: Path, limit: int | None, best: str | None, kept: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints beyond `limit` (None: keep all), except the newest, `best` and `kept`."""
    if limit is None or limit <= 0:
        return
    found = checkpoints(run_dir)
    protected = {found[-1].resolve()} if found else set()
    if best is not None:
        protected.add(Path(best).resolve())
    protected |= {path.resolve() for path in kept} & {path.resolve() for path in found}
    spare = [folder for folder in found if folder.resolve() not in protected]
    for folder in spare[: max(0, len(found) - max(limit, len(protected)))]:
        discard(folder)


class RunLock:
    """File lock on an output directory, released at the latest when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Acquire the lock, or raise RunLockError; on a disk without file locks, only warn."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=DYING)
            except Timeout:
                holder = self._path.read_text(encoding="utf-8") or "unknown"
                raise RunLockError(
                    f"`output_dir={str(folder)!r}` belongs to another run ({holder}). End it, or set another "
                    f"output_dir."
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "`output_dir=%r` lies on a disk without file locks (%s): start no second run there.",
                    str(folder), error,
                )  # fmt: skip
                return
            self._path.write_text(f"host {socket.gethostname()}, process {os.getpid()}", encoding="utf-8")
        except OSError as error:
            self.release()
            raise CheckpointWriteError(
                f"`output_dir={str(folder)!r}` cannot be written to: {type(error).__name__}: {error}."
            ) from error

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()
