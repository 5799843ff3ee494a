"""Turns with their context, in the form that turn reward functions and reward models take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .reward_funcs import check_columns, checked, name_of

# Columns that reward functions get under another name, or do not get.
RESERVED = ("prompt", "completion", "completion_ids")


@dataclass
class Turn:
    """One turn and everything before it.

    Attributes:
        episode: number of its episode in the rollout.
        number: number of the turn, from 0.
        prompt: messages or text before the turn.
        completion: the turn, as a list of one message or as text.
        before: tokens before the turn.
        ids: its tokens.
        columns: columns of the dataset row.
    """

    episode: int
    number: int
    prompt: Any
    completion: Any
    before: list[int]
    ids: list[int]
    columns: dict[str, Any]


def arguments_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the arguments of a turn reward function: the rows' columns, the turns and their prompts."""
    columns = [key for key in turns[0].columns if key not in RESERVED]
    return {
        **{key: [turn.columns[key] for turn in turns] for key in columns},
        "prompts": [turn.prompt for turn in turns],
        "completions": [turn.completion for turn in turns],
        "completion_ids": [turn.ids for turn in turns],
        "turn": [turn.number for turn in turns],
    }


def scores_of(
    func: Callable[..., Any], turns: Sequence[Turn], wait: Callable[[Any], Any], **more: Any
) -> list[float | None]:
    """Call a turn reward function, and return a checked score or None for each turn.

    `wait` resolves the awaitable of an asynchronous function, and returns other values unchanged.
    """
    arguments = arguments_of(turns) | more
    check_columns(func, arguments, [key for key in turns[0].columns if key not in RESERVED])
    scores = checked(wait(func(**arguments)), func, len(turns))
    if len(scores) != len(turns):
        raise ValueError(f"`{name_of(func)}` returned {len(scores)} rewards for {len(turns)}.")
    return scores
