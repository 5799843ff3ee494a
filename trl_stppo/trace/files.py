"""The files of a trace: one compressed JSONL per update and process, `trace/train-0000012-rank0.jsonl.gz`.

The first line is the update, each other an episode. A file appears under its name when it is complete, so
that a killed run leaves none that is half written; an update that is done again replaces its file.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .format import FORMAT, VERSION, TracedEpisode, TracedUpdate

logger = logging.getLogger(__name__)

FOLDER = "trace"
ENDING = ".jsonl.gz"
# Level of gzip: 6 takes almost three times as long for 6% less.
COMPRESSION = 4


def file_name(update: TracedUpdate) -> str:
    """Of the update's file, on the process that writes it."""
    name = re.sub(r"[^\w.-]", "_", update.name)
    number = update.update if update.phase == "train" else update.global_step
    return f"{name}-{number:07d}-rank{update.process}{ENDING}"


def write_update(folder: Path, update: TracedUpdate, episodes: Iterable[dict[str, Any]]) -> Path:
    """Write an update's file, all of it or nothing.

    Args:
        folder: is made where it is missing.
        update: what the episodes belong to.
        episodes: as `TracedEpisode.to_json` makes them.

    Raises:
        OSError: the file cannot be written; nothing of it is left.
    """
    lines = [_dumps(update.to_json()), *(_dumps(episode) for episode in episodes)]
    content = gzip.compress("".join(lines).encode("ascii"), COMPRESSION, mtime=0)
    path = folder / file_name(update)
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
    # ASCII: what is no text at all, such as half of a surrogate pair, comes back as it was.
    return json.dumps(line, separators=(",", ":"), default=str, allow_nan=False) + "\n"


def read_trace(folder: str | Path) -> Iterator[TracedEpisode]:
    """The episodes of a run, in the order in which they were played, one at a time.

    Updates that a resumed or restarted run has done again are read once, in their latest form.

    Args:
        folder: the run's `output_dir`, or the trace folder in it.

    Raises:
        TraceError: there is no trace, or a newer version of this package has written it.
    """
    updates = read_updates(folder)  # here, not when the first episode is asked for
    return (episode for update, path in updates for episode in read_episodes(update, path))


def read_updates(folder: str | Path) -> list[tuple[TracedUpdate, Path]]:
    """What was recorded when, and where its episodes are; see `read_trace`."""
    place = trace_folder(folder)
    found = []
    for path in sorted(place.glob(f"*{ENDING}")):
        update = _read_header(path)
        if update is not None:
            found.append((update, path))
    starts = {(*_start(update), update.first_step) for update, _ in found}
    kept = [entry for entry in found if not _is_superseded(entry[0], starts)]
    if not kept:
        raise TraceError(f"`{place}` holds no readable trace file. {_ADVICE}")
    return sorted(kept, key=lambda entry: _order(entry[0]))


def next_start(folder: Path) -> int:
    """The number of a training that begins now: one more than any has that was recorded there."""
    headers = map(_read_header, folder.glob(f"*{ENDING}"))
    return 1 + max((update.start for update in headers if update is not None), default=0)


def _start(update: TracedUpdate) -> tuple[int, float]:
    """Sorts trainings by when they began: by number, not by a clock that may have gone back."""
    return update.start, update.started if update.start == 0 else 0.0


def read_episodes(update: TracedUpdate, path: Path) -> Iterator[TracedEpisode]:
    """The episodes of one file; a damaged rest is left out with a warning."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            next(lines)
            for line in lines:
                yield TracedEpisode.from_json(json.loads(line), update)
    except _DAMAGE as error:
        _warn(path, error)


_ADVICE = (
    "The option `trace_episodes` (8 by default, 0 for none) of PPOConfig, STPPOConfig and STGRPOConfig "
    "records that many episodes of every update in `output_dir/trace`; the first file is there when the "
    "first update is over."
)
# What reading a cut or overwritten file can raise.
_DAMAGE = (OSError, EOFError, ValueError, TypeError, KeyError, StopIteration, AttributeError)


def trace_folder(folder: str | Path) -> Path:
    """The folder with the files, given it or the run that it belongs to."""
    folder = Path(folder)
    if not folder.is_dir():
        there = "is a file" if folder.exists() else "does not exist"
        raise TraceError(f"`{folder}` {there}. Name the `output_dir` of a run.")
    for place in (folder / FOLDER, folder):
        if any(place.glob(f"*{ENDING}")):
            return place
    raise TraceError(f"`{folder}` holds no trace. {_ADVICE}")


def _read_header(path: Path) -> TracedUpdate | None:
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            line = json.loads(next(lines))
            if line.get("format") != FORMAT:
                return None
            if line["version"] > VERSION:
                raise TraceError(
                    f"`{path}` has version {line['version']} of the format; this package reads up to "
                    f"{VERSION}. Update trl-stppo."
                )
            return TracedUpdate.from_json(line)
    except TraceError:
        raise
    except (*_DAMAGE, RuntimeError) as error:
        _warn(path, error)
        return None


def _warn(path: Path, error: Exception) -> None:
    logger.warning("%s is damaged and left out (%s: %s).", path, type(error).__name__, error)


def _is_superseded(
    update: TracedUpdate, starts: Iterable[tuple[int, float, int | None]]
) -> bool:
    """Whether a later start of the run began before this update, and so went another way."""
    for *start, first_step in starts:
        if first_step is None or tuple(start) <= _start(update):
            continue
        done_again = update.global_step - (update.phase == "eval") >= first_step
        if done_again:
            return True
    return False


def _order(update: TracedUpdate) -> tuple[Any, ...]:
    # An evaluation at step 8 comes before the episodes that are played at step 8.
    return update.global_step, update.phase == "train", update.update, update.name, update.process
