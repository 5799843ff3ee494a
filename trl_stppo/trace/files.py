"""Trace files: one compressed JSONL per update and process, such as `trace/train-0000012-rank0.jsonl.gz`.

The first line is the update, each other line an episode. Files are written atomically; an update that is
repeated replaces its file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .format import FORMAT, VERSION, TracedEpisode, TracedUpdate

logger = logging.getLogger(__name__)

FOLDER = "trace"
ENDING = ".jsonl.gz"
# Level of gzip: 6 needs almost three times as long for 6% less.
COMPRESSION = 4


def write_update(folder: Path, update: TracedUpdate, episodes: Iterable[dict[str, Any]]) -> Path:
    """Write the trace file of an update atomically. Episodes are dictionaries of `TracedEpisode.to_json`."""
    lines = [_dumps(update.to_json()), *(_dumps(episode) for episode in episodes)]
    content = gzip.compress("".join(lines).encode("ascii"), COMPRESSION, mtime=0)
    name = re.sub(r"[^\w.-]", "_", update.name)
    number = update.update if update.phase == "train" else update.global_step
    path = folder / f"{name}-{number:07d}-rank{update.process}{ENDING}"
    aside = folder / f".{path.name}.{os.getpid()}.writing"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return path


def _dumps(line: dict[str, Any]) -> str:
    # ASCII keeps invalid text, such as half of a surrogate pair.
    return json.dumps(line, separators=(",", ":"), default=str) + "\n"


def read_trace(folder: str | Path) -> Iterator[TracedEpisode]:
    """Read the episodes of a run in the order of play, one at a time.

    Updates that a resumed or restarted run repeats are read once, in their latest form. Damaged parts
    are left out with a warning.

    Args:
        folder: the run's `output_dir`, or the trace folder in it.

    Raises:
        TraceError: there is no trace, or a newer version of this package has written it.
    """
    damage = Counter[str]()
    # Errors are raised now, not with the first episode.
    updates = read_updates(folder, damage)
    return (episode for head, path in updates for episode in read_episodes(head, path, damage))


def left_out(damage: Counter[str]) -> str:
    """Return the end of a sentence that counts damaged files and episodes; an empty text without any."""
    named = [
        f"{n} {what}{'s' if n > 1 else ''}" for what, n in sorted(damage.items(), reverse=True)
    ]
    return f"; {' and '.join(named)} left out as damaged" if named else ""


def read_updates(folder: str | Path, damage: Counter[str]) -> list[tuple[TracedUpdate, Path]]:
    """Return the updates of a run, in order, with their trace files; count each damaged "file"."""
    folder = Path(folder)
    if not folder.is_dir():
        there = "is a file" if folder.exists() else "does not exist"
        raise TraceError(f"`{folder}` {there}; must be the `output_dir` of a run.")
    found = _read_headers(folder / FOLDER, damage) or _read_headers(folder, damage)
    if not found:
        raise TraceError(
            f"`{folder}` holds no readable trace. The option `trace_episodes` (8 by default) records that "
            "many episodes of every update in `output_dir/trace`."
        )
    starts = {(update.start, update.first_step) for update, _ in found}
    latest = [entry for entry in found if not _is_superseded(entry[0], starts)]
    return sorted(latest, key=lambda entry: _order(entry[0]))


def next_start(folder: Path) -> int:
    """Return the number for a new training: one more than the highest recorded number."""
    return 1 + max((update.start for update, _ in _read_headers(folder, Counter())), default=0)


def read_episodes(
    update: TracedUpdate, path: Path, damage: Counter[str], **options: Any
) -> Iterator[TracedEpisode]:
    """Yield the episodes of a trace file; skip and count each damaged "episode".

    `options` are those of `json.loads`.
    """
    read = 0
    reason: Exception = EOFError("the file has lost its end")
    for line in _lines(path)[1:]:
        try:
            episode = TracedEpisode.from_json(json.loads(line, **options), update)
        except _DAMAGE as error:
            reason = error
        else:
            read += 1
            yield episode
    if (lost := update.episodes - read) > 0:
        logger.warning(
            "A part of %s is damaged and left out: %d of %d episodes (%s: %s).",
            path, lost, update.episodes, type(reason).__name__, reason,
        )  # fmt: skip
        damage["episode"] += lost


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a trace file, even if its end is missing. Raise an error for other damage."""
    text = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    return text.removesuffix(b"\n").split(b"\n")


# Errors of reading a damaged file.
_DAMAGE = (OSError, zlib.error, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _read_headers(folder: Path, damage: Counter[str]) -> list[tuple[TracedUpdate, Path]]:
    found = []
    for path in sorted(folder.glob(f"*{ENDING}")):
        try:
            line = json.loads(_lines(path)[0])
            if line["format"] != FORMAT:
                raise ValueError(f"its format is {str(line['format'])[:40]!r}")
            if line["version"] <= VERSION:
                found.append((TracedUpdate.from_json(line), path))
                continue
        except _DAMAGE as error:
            logger.warning(
                "%s is damaged and left out (%s: %s).", path, type(error).__name__, error
            )
            damage["file"] += 1
            continue
        version = line["version"]
        raise TraceError(
            f"`{path}`: format version is {version}, must be <= {VERSION}. Update trl-stppo."
        )
    return found


def _is_superseded(update: TracedUpdate, starts: Iterable[tuple[int, int | None]]) -> bool:
    """Return whether a later (resumed) training of the run has repeated this update."""
    step = update.global_step - (update.phase == "eval")
    return any(
        start > update.start and first_step is not None and step >= first_step
        for start, first_step in starts
    )


def _order(update: TracedUpdate) -> tuple[Any, ...]:
    # An evaluation at step 8 comes before the rollout at step 8.
    return update.global_step, update.phase == "train", update.update, update.name, update.process
