"""Checkpoint folders that exist whole or not at all.

A checkpoint is written into a staging folder, described by a manifest, flushed to the disk and then
renamed. Nothing that is called `checkpoint-<step>` is ever half written; what a killed process leaves
behind is finished or thrown away by the next one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...hub.pushing import EPISODES
from ...watch.runs import MANIFEST
from . import disk

logger = logging.getLogger(__name__)

# Inside the output directory, on the same disk: renaming must be atomic. Upstream leaves out of an
# upload what begins with an underscore.
STAGING = "_incomplete"
TRASH = "_deleted"
FORMAT = 1
_NAME = re.compile(r"checkpoint-\d+")
# What a manifest holds.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **{"saved_at": (int, float), "global_step": int, "files": dict, "order": int, "crc32": dict},
    **{"resumable": bool, "inside_rollout": bool, "identity": dict, "cut": dict, "settings": dict},
    "run": str,
}


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Flush a written folder to the disk and list what is in it; the last thing done to it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    needed = [p for p in files if not p.match(EPISODES)]  # which a copy from the Hub lacks
    names = [p.relative_to(folder).as_posix() for p in needed]
    manifest = {
        "format": FORMAT,
        "saved_at": time.time(),
        **about,
        "files": {name: path.stat().st_size for name, path in zip(names, needed, strict=True)},
        "crc32": dict(zip(names, disk.checksums(needed), strict=True)),
    }
    for path in files:
        disk.flush(path)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    disk.flush(folder / MANIFEST)


def publish(staged: Path, final: Path) -> None:
    """Put a sealed folder where checkpoints are looked for, in place of an older one if need be."""
    if os.path.lexists(final):
        discard(final)
    os.replace(staged, final)
    disk.remove(staged.parent)
    disk.flush(final.parent)


def discard(folder: Path) -> None:
    """Delete a checkpoint so that a kill half-way leaves nothing that looks like one.

    Where it lies elsewhere and is a link here, the link goes and the checkpoint stays.
    """
    trash = folder.parent / TRASH
    disk.remove(trash)
    os.replace(folder, trash)
    disk.remove(trash)


def tidy(run_dir: Path) -> None:
    """Finish or throw away what a killed process has left in an output directory."""
    for folder in unpublished(run_dir):
        publish(folder, run_dir / folder.name)
    disk.remove(run_dir / STAGING)
    disk.remove(run_dir / TRASH)


def unpublished(run_dir: Path) -> list[Path]:
    """Complete checkpoints that a killed process did not come to put in place."""
    found = (run_dir / STAGING).glob("checkpoint-*")
    return [folder for folder in found if complaint(folder) is None]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint."""
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
    """What is wrong with a checkpoint, None if every file is there in its full size.

    If `thorough`, each file is read and compared with what was written.
    """
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
    return _wrong_content(folder, manifest["crc32"]) if thorough else None


def _wrong_content(folder: Path, written: dict[str, str]) -> str | None:
    """Which of these files does not hold what was written."""
    try:
        found = disk.checksums([folder / name for name in written])
    except (OSError, ValueError) as error:
        return f"`{folder}` cannot be read ({error}). Resume from another checkpoint."
    for name, now in zip(written, found, strict=True):
        if now != written[name]:
            return f"`{folder / name}` is not what was written: CRC-32 {now}, not {written[name]}."
    return None


def checkpoints(run_dir: Path) -> list[Path]:
    """Folders named as checkpoints, oldest first; before them those whose age nobody can tell.

    In the order in which they were written, not by step: after a run has gone back to an older
    checkpoint, those of the branch that it left have higher steps.
    """
    if not run_dir.is_dir():
        return []
    found = sorted(run_dir.iterdir())
    return sorted((p for p in found if p.is_dir() and _NAME.fullmatch(p.name)), key=_age)


def _age(folder: Path) -> tuple[int, float, int]:
    """Sorts by age, whatever the clock has done meanwhile; copies keep it."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return -1, folder.stat().st_mtime, 0
    return manifest["order"], manifest["saved_at"], manifest["global_step"]


def next_order(run_dir: Path) -> int:
    """The number of a checkpoint that is written now: one more than the newest has."""
    return 1 + max((_age(folder)[0] for folder in checkpoints(run_dir)), default=0)


def last_complete(run_dir: Path, wanted: str | bool = True, *, thorough: bool = False) -> Path:
    """The newest checkpoint that can be resumed from. `wanted`: the argument to which this is the answer."""
    found = checkpoints(run_dir)
    ageless = [folder for folder in found if _age(folder)[0] < 0]  # which may be the newest
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
    """A `resume_from_checkpoint` with true and false as such: a command line knows no types."""
    return {"true": True, "false": False}.get(str(wanted).lower(), wanted)


def to_resume(run_dir: Path, wanted: str | bool | None, *, thorough: bool = False) -> Path | None:
    """The checkpoint that `train(resume_from_checkpoint=wanted)` goes on from; nothing is changed.

    Returns:
        Its folder, None for a run that starts.
    """
    wanted = as_meant(wanted)
    if not wanted or (wanted == "auto" and not checkpoints(run_dir)):
        return None
    if wanted is True or wanted == "auto":
        return last_complete(run_dir, wanted, thorough=thorough)
    folder = Path(wanted)
    if not folder.is_dir() and (run_dir / wanted).is_dir():  # "last-checkpoint", as the Hub has it
        folder = run_dir / wanted
    problem = complaint(folder, thorough=thorough)
    if problem is not None:
        raise CheckpointError(problem)
    return folder


def prune(run_dir: Path, limit: int | None, best: str | None, kept: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints beyond `limit`, never the newest or the best one.

    `limit`: how many may stay, None for all; `best`: path of the best one, None without; `kept`: that
    somebody still reads.
    """
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
