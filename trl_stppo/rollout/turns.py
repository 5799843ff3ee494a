"""Turns with everything before them, as functions and models that score turns get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .chat import Message
from .episode import Episode
from .record import check_reward
from .reward_funcs import check_columns, listed, name_of

# Columns that reward functions get under another name, or not at all.
RESERVED = ("prompt", "completion", "completion_ids")


@dataclass
class Turn:
    """One turn and everything before it."""

    episode: int  # number of its episode in the rollout
    number: int  # of the turn, from 0
    prompt: Any  # messages or text before the turn
    completion: Any  # the turn, as a list of one message or as text
    before: list[int]  # tokens before the turn
    ids: list[int]  # its tokens
    columns: dict[str, Any]  # of the dataset row


@dataclass(frozen=True)
class Selection:
    """Sample several turns in each state, and play the one that is scored best."""

    candidates: int  # how many, at least 2
    scores: Callable[[list[Turn]], list[float]]  # of turns; of equal ones the first is played


def candidate(tokenizer: Any, episode: Episode, message: Message, ids: list[int]) -> Turn:
    """A turn that the episode has not taken yet."""
    before = episode.prompt_ids + episode.ids
    if episode.conversational:
        context: Any = [*episode.prompt, *episode.messages]
        completion: Any = [message]
    else:
        said = tokenizer.decode(episode.ids, skip_special_tokens=True)
        context, completion = f"{episode.prompt}{said}", message["content"]
    return Turn(episode.row, episode.num_turns, context, completion, before, ids, episode.columns)


def arguments_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """What a function that scores turns is asked with: the rows' columns, and the turns in their context."""
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
    """What a function says of turns.

    `wait` turns what an asynchronous function returns into its result, and leaves others alone.
    """
    arguments = arguments_of(turns) | more
    check_columns(func, arguments, [key for key in turns[0].columns if key not in RESERVED])
    scores = listed(wait(func(**arguments)), name_of(func), len(turns))
    if len(scores) != len(turns):
        raise ValueError(
            f"`{name_of(func)}` returned {len(scores)} rewards for {len(turns)} turns."
        )
    return [
        None if score is None else check_reward(score, f"{name_of(func)}()[{i}]")
        for i, score in enumerate(scores)
    ]
