"""What a rollout tells the trainer besides token ids: turns, their rewards, how episodes ended.

Filled in while the rollout happens, by whoever runs it; the trainer never infers turns from rewards
or text. Python lists only: tensors begin in `rollout/batch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import TurnSpanError


class StopReason(StrEnum):
    """Why an episode ended; exactly one each."""

    TERMINATED = "terminated"  # the task's own end
    TRUNCATED = "truncated"  # cut off by the environment
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"


@dataclass
class RolloutRecord:
    """One entry per episode of the local rollout batch; `None` where the rollout did not say.

    Attributes:
        turn_spans: per episode the half-open `(start, end)` token offsets of its turns, counted from
            the first token after the prompt.
        turn_rewards: per episode one reward per turn.
        terminated, truncated: the task's own end against a cut-off from outside.
        stop_reasons: the reason in words.
        success: whether the task was solved, `None` for an episode whose environment does not say.
        valid_actions: per episode and turn whether the environment could read the action.
        env_seconds: wall-clock time spent inside environments.
    """

    turn_spans: list[list[tuple[int, int]]] | None = None
    turn_rewards: list[list[float]] | None = None
    terminated: list[bool] | None = None
    truncated: list[bool] | None = None
    stop_reasons: list[StopReason] | None = None
    success: list[bool | None] | None = None
    valid_actions: list[list[bool]] | None = None
    env_seconds: float = 0.0
    generation_seconds: float = field(default=0.0, compare=False)

    def check_turn_rewards(self) -> None:
        """Raise unless every turn has one finite reward."""
        if self.turn_rewards is None or self.turn_spans is None:
            return
        for episode, (rewards, spans) in enumerate(
            zip(self.turn_rewards, self.turn_spans, strict=True)
        ):
            if len(rewards) != len(spans):
                raise ValueError(
                    f"`turn_rewards[{episode}]` has {len(rewards)} entries, but episode {episode} has "
                    f"{len(spans)} turns. Return one reward per turn, 0.0 where there is none."
                )
            for turn, reward in enumerate(rewards):
                check_reward(reward, f"turn_rewards[{episode}][{turn}]")


def check_reward(value: Any, name: str) -> float:
    """Return a reward as a float, or raise a ValueError that names where it came from."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(
            f"`{name}` is {value!r}; a reward must be a finite number. One NaN would spread through "
            f"the whitened advantages to every token of the batch. Fix the source of the reward."
        )
    return number


def spans_from_mask(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of ones, as half-open spans."""
    spans, start = [], None
    for position, flag in enumerate([*mask, 0]):
        if flag and start is None:
            start = position
        elif not flag and start is not None:
            spans.append((start, position))
            start = None
    return spans


def mask_from_spans(spans: Sequence[tuple[int, int]], length: int) -> list[int]:
    """One where a span covers the token, else zero."""
    mask = [0] * length
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return mask


def check_spans(spans: Sequence[Sequence[int]], length: int, episode: int) -> None:
    """Raise TurnSpanError unless the spans are non-empty, ordered, disjoint and inside the episode."""
    previous = 0
    for turn, span in enumerate(spans):
        start, end = span
        if not (previous <= start < end <= length):
            raise TurnSpanError(
                f"`turn_spans[{episode}][{turn}]` is ({start}, {end}); allowed are half-open spans with "
                f"{previous} <= start < end <= {length} (the end of the turn before, and the length of "
                f"the completion). Offsets count from the first token after the prompt."
            )
        previous = end
