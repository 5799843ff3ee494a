"""One held-out row as it was played before training and after, for the model card.

Rows and what is said about them stay here, but for those that the environment's class itself offers
(`datasets()`): whoever can run the agent has these anyway.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from ...errors import TraceError
from ...hub.description import Description
from ...hub.markdown import plain
from ...trace.files import read_episodes, read_updates
from ...trace.format import TracedEpisode, TracedUpdate
from ..recording.facts import prompt_id, short_columns

MESSAGE = 300  # characters of one that are shown


def offered_rows(run: Description, *rows: Any) -> str | None:
    """The name under which the only environment's class offers all these rows; None if it does not."""
    names = {getattr(getattr(some, "info", None), "dataset_name", None) for some in rows}
    if len(run.environments) != 1 or len(names) != 1 or not run.environments[0].importable:
        return None
    environment, name = run.environments[0], names.pop()
    cls = getattr(importlib.import_module(environment.module), environment.class_name, None)
    offer = getattr(cls, "datasets", None)
    return name if inspect.ismethod(offer) and name in offer() else None


def shown_episode(folder: Path, rows: Any) -> dict[str, Any] | None:
    """A row of the first and of the last evaluation that a run has recorded.

    Args:
        folder: the run's `output_dir`, in which another run may have left episodes of other rows.
        rows: the held-out ones, of which the row must be one.

    Returns:
        `prompt` and short `columns` of the row, and `played`: of before training, if that was recorded, and
        of after it a heading and what was said. None where no such row was recorded.
    """
    try:
        held = [entry for entry in read_updates(folder) if entry[0].phase == "eval"]
    except TraceError:
        return None
    if not held:
        return None
    after = _episodes(held, held[-1][0], rows)
    before = _episodes(held, held[0][0], rows) if held[0][0].global_step == 0 else {}
    if not after:
        return None
    both = [key for key in after if key in before]
    # The one that says most: failed, and then solved.
    both.sort(key=lambda key: (before[key].success is not False) + (after[key].success is not True))
    key = both[0] if both else next(iter(after))
    last, pairs = after[key], [(after[key].update, after[key])]
    if both and held[-1][0].global_step:
        pairs.insert(0, (before[key].update, before[key]))
    return {
        "prompt": _said(last.prompt if isinstance(last.prompt, list) else []),
        "columns": "; ".join(f"{name}: {_words(value)}" for name, value in last.columns.items()),
        "played": [
            (
                _heading(update, one),
                _said(one.messages or [], assistant="agent", user=one.observations),
            )
            for update, one in pairs
        ],
    }


def _episodes(
    held: list[tuple[TracedUpdate, Path]], wanted: TracedUpdate, rows: Any
) -> dict[tuple[int, int], TracedEpisode]:
    """Those of these rows in one evaluation, of all processes, by row and repetition."""
    same = (wanted.name, wanted.global_step)
    files = [entry for entry in held if (entry[0].name, entry[0].global_step) == same]
    found = {(e.row, e.repetition): e for entry in files for e in read_episodes(*entry)}
    return {key: e for key, e in found.items() if _is_of(e, rows)}


def _is_of(episode: TracedEpisode, rows: Any) -> bool:
    if episode.row >= len(rows):
        return False
    row = dict(rows[episode.row])
    return (prompt_id(row), short_columns(row)) == (episode.prompt_id, episode.columns)


def _heading(update: TracedUpdate, episode: TracedEpisode) -> str:
    when = (
        f"After {update.global_step} optimizer steps" if update.global_step else "Before training"
    )
    result = {True: "solved, ", False: "failed, ", None: ""}[episode.success]
    return f"{when}: {result}score {episode.score:g}" if episode.score is not None else when


def _said(messages: list[dict[str, Any]], **names: str) -> str:
    """A line per message; roles may have other names."""
    lines = []
    for message in messages:
        words = [message.get("content"), message.get("tool_calls")]
        said = " ".join(_words(part) for part in words if part)
        role = str(message.get("role"))
        lines.append(f"{names.get(role, role)}: {plain(said, MESSAGE)}")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return " | ".join(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)
