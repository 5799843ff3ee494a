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
import time
import zlib
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
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
STAGING, TRASH, LOCK = "_incomplete", "_deleted", "_running.json"
# What a manifest says of its checkpoint: files with sizes and digests, and the run.
Manifest = dict[str, Any]
MANIFEST = "stppo_checkpoint.json"
EPISODES = "episodes_*.pt"
# Files of a checkpoint that stay on this machine: logged texts, and settings with the user's tokens.
LOCAL = (EPISODES, "training_args.bin")
FORMAT = 2
_NAME = re.compile(r"checkpoint-\d+")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **{"saved_at": (int, float), "global_step": int, "files": dict, "order": int, "crc32": dict},
    **{"resumable": bool, "identity": dict, "split": dict, "settings": dict},
    "run": str,
}


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
    needed = [p for p in files if not any(map(p.match, LOCAL))]
    named = {p.relative_to(folder).as_posix(): p for p in needed}
    manifest = {
        "format": FORMAT,
        "saved_at": time.time(),
        **about,
        "files": {name: path.stat().st_size for name, path in named.items()},
        "crc32": {name: checksum(path) for name, path in named.items()},
    }
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
        raise CheckpointError(
            f"`{folder}` has no {MANIFEST}: it is incomplete, or another trainer wrote it."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(manifest, dict):
        raise _damaged(path, f"it holds {manifest!r:.40}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"`{path}` has format {manifest.get('format')!r}; this version reads {FORMAT}."
        )
    for name, kind in _FIELDS.items():
        if name not in manifest:
            raise _damaged(path, f"it has no {name!r}")
        if not isinstance(manifest[name], kind):
            raise _damaged(path, f"its {name!r} is {manifest[name]!r:.40}")
    return manifest


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"`{path}` is damaged ({what}). Resume from another checkpoint.")


def complaint(folder: Path, *, thorough: bool = False) -> str | None:
    """Return a description of a checkpoint's damage, or None; if `thorough`, also check file contents."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"`{folder}` lacks the file {name!r}, which was there when it was written."
        if path.stat().st_size != size:
            return f"`{path}` has {path.stat().st_size} bytes; it was written with {size}."
    if not thorough:
        return None
    for name, written in manifest["crc32"].items():
        try:
            now = checksum(folder / name)
        except (OSError, ValueError) as error:
            return f"`{folder}` cannot be read ({error}). Resume from another checkpoint."
        if now != written:
            return (
                f"`{folder / name}` has changed since it was written: CRC-32 {now}, not {written}."
            )
    return None


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first; folders without a valid manifest come at the beginning.

    They are sorted by the order of writing, not by step: after a run has gone back to an older
    checkpoint, the checkpoints of the abandoned branch have higher steps.
    """
    if not run_dir.is_dir():
        return []
    found = sorted(run_dir.iterdir())
    return sorted((p for p in found if p.is_dir() and _NAME.fullmatch(p.name)), key=_age)


def _age(folder: Path) -> tuple[int, float, int]:
    """Return a key that sorts checkpoints by their order of writing, independent of the clock."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return -1, folder.stat().st_mtime, 0
    return manifest["order"], manifest["saved_at"], manifest["global_step"]


def next_order(run_dir: Path) -> int:
    """Return the order number of a new checkpoint: the newest checkpoint's number plus 1."""
    return 1 + max((_age(folder)[0] for folder in checkpoints(run_dir)), default=0)


def last_complete(run_dir: Path, wanted: str | bool = True, *, thorough: bool = False) -> Path:
    """Return the newest complete checkpoint; errors quote `wanted`."""
    found = checkpoints(run_dir)
    # A folder without a valid manifest may be the newest, so it comes first.
    ageless = [folder for folder in found if _age(folder)[0] < 0]
    complaints: list[str] = []
    for folder in [*ageless, *reversed(found[len(ageless) :])]:
        problem = complaint(folder, thorough=thorough)
        if problem is None:
            if complaints:
                logger.warning("Resuming from %s. Passed over: %s", folder, " ".join(complaints))
            return folder
        complaints.append(problem)
    raise CheckpointError(
        f"`resume_from_checkpoint={wanted!r}`, but `{run_dir}` holds no checkpoint to resume from"
        + (": " + " ".join(complaints) if complaints else ". Start without it, or pass a path.")
    )


def as_meant(wanted: str | bool | None) -> str | bool | None:
    """Convert the texts 'true' and 'false' of `resume_from_checkpoint` to booleans."""
    return {"true": True, "false": False}.get(str(wanted).lower(), wanted)


def to_resume(run_dir: Path, wanted: str | bool | None, *, thorough: bool = False) -> Path | None:
    """Find the checkpoint for `resume_from_checkpoint=wanted`; return None for a new run."""
    wanted = as_meant(wanted)
    if not wanted or (wanted == "auto" and not checkpoints(run_dir)):
        return None
    if wanted is True or wanted == "auto":
        return last_complete(run_dir, wanted, thorough=thorough)
    folder = Path(wanted)
    # A name in the output directory is allowed too, such as the Hub's "last-checkpoint".
    if not folder.is_dir() and (run_dir / wanted).is_dir():
        folder = run_dir / wanted
    problem = complaint(folder, thorough=thorough)
    if problem is not None:
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
                raise self._refused() from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "`output_dir=%r` lies on a disk without file locks (%s): start no second run there.",
                    str(folder), error,
                )  # fmt: skip
                return
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
            self._path.write_text(json.dumps(holder), encoding="utf-8")
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

    def _refused(self) -> RunLockError:
        other = {"host": "unknown", "pid": "unknown", "since": "a moment ago"}
        with suppress(OSError, ValueError):
            other |= json.loads(self._path.read_text(encoding="utf-8"))
        return RunLockError(
            f"`output_dir={str(self._path.parent)!r}` belongs to a run on host {other['host']}, process "
            f"{other['pid']}, since {other['since']}. End it, or set another output_dir."
        )
