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
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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

    Updates that a resumed or restarted run has done again are read once, in their latest form. What is
    damaged is left out with a warning.

    Args:
        folder: the run's `output_dir`, or the trace folder in it.

    Raises:
        TraceError: there is no trace, or a newer version of this package has written it.
    """
    updates = read_updates(folder)  # here, not when the first episode is asked for
    return (episode for update, path in updates for episode in read_episodes(update, path))


@dataclass
class Damage:
    """What had to be left out.

    Attributes:
        files: of which nothing could be read.
        episodes: of the other files.
    """

    files: int = 0
    episodes: int = 0

    def __bool__(self) -> bool:
        return bool(self.files or self.episodes)

    def __str__(self) -> str:
        counts = {"file": self.files, "episode": self.episodes}
        named = [f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items() if n]
        return f"{' and '.join(named)} left out as damaged"


def read_updates(
    folder: str | Path, damage: Damage | None = None
) -> list[tuple[TracedUpdate, Path]]:
    """What was recorded when, and where its episodes are; see `read_trace`."""
    place = trace_folder(folder)
    damage = Damage() if damage is None else damage
    found = []
    for path in sorted(place.glob(f"*{ENDING}")):
        update = _read_header(path, damage)
        if update is not None:
            found.append((update, path))
    starts = {(*_start(update), update.first_step) for update, _ in found}
    kept = [entry for entry in found if not _is_superseded(entry[0], starts)]
    if not kept:
        raise TraceError(f"`{place}` holds no readable trace file. {_ADVICE}")
    return sorted(kept, key=lambda entry: _order(entry[0]))


def next_start(folder: Path) -> int:
    """The number of a training that begins now: one more than any has that was recorded there."""
    headers = (_read_header(path, Damage()) for path in folder.glob(f"*{ENDING}"))
    return 1 + max((update.start for update in headers if update is not None), default=0)


def _start(update: TracedUpdate) -> tuple[int, float]:
    """Sorts trainings by when they began: by number, not by a clock that may have gone back."""
    return update.start, update.started if update.start == 0 else 0.0


def read_episodes(
    update: TracedUpdate, path: Path, damage: Damage | None = None
) -> Iterator[TracedEpisode]:
    """The episodes of one file; what cannot be read is added to `damage`."""
    lost = Damage()
    for line in _lines(path)[1:]:  # as whole as when its first line was read
        try:
            episode = TracedEpisode.from_json(json.loads(line), update)
        except _DAMAGE as error:
            lost.episodes, reason = lost.episodes + 1, error
        else:
            yield episode
    if lost.episodes:
        _warn_of_episodes(path, lost.episodes, update.episodes, reason)
    if damage is not None:
        damage.episodes += lost.episodes


def _lines(path: Path) -> list[bytes]:
    """The lines of a file that is whole, or has lost its end; of any other, nobody knows which are right.

    Raises:
        OSError, zlib.error: it is damaged in another way.
    """
    text = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
    return text.removesuffix(b"\n").split(b"\n")


_ADVICE = (
    "The option `trace_episodes` (8 by default, 0 for none) of PPOConfig, STPPOConfig and STGRPOConfig "
    "records that many episodes of every update in `output_dir/trace`; the first file is there when the "
    "first update is over."
)
# What reading a cut or overwritten file can raise.
_DAMAGE = (
    *(OSError, zlib.error, ValueError, TypeError, KeyError, AttributeError),
    *(OverflowError, RecursionError),
)


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


def _read_header(path: Path, damage: Damage) -> TracedUpdate | None:
    try:
        head, *rest = _lines(path)
        line = json.loads(head)
        if line["format"] != FORMAT:
            raise ValueError(f"its format is {str(line['format'])[:40]!r}")
        if line["version"] > VERSION:
            raise TraceError(
                f"`{path}` has version {line['version']} of the format; this package reads up to "
                f"{VERSION}. Update trl-stppo."
            )
        update = TracedUpdate.from_json(line)
    except TraceError:
        raise
    except _DAMAGE as error:
        logger.warning("%s is damaged and left out (%s: %s).", path, type(error).__name__, error)
        damage.files += 1
        return None
    if lost := max(0, update.episodes - len(rest)):
        _warn_of_episodes(path, lost, update.episodes, EOFError("the file has lost its end"))
        damage.episodes += lost
    return replace(update, episodes=len(rest))


def _warn_of_episodes(path: Path, lost: int, of: int, error: Exception) -> None:
    logger.warning(
        "A part of %s is damaged and left out: %d of %d episodes (%s: %s).",
        path, lost, of, type(error).__name__, error,
    )  # fmt: skip


def _is_superseded(update: TracedUpdate, starts: Iterable[tuple[int, float, int | None]]) -> bool:
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
