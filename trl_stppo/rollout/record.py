"""Reasons for an episode's end, its success, and checks of rewards and turn spans."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

from ..errors import TurnSpanError


class StopReason(StrEnum):
    """The reason why an episode ended. Each ended episode has exactly one reason."""

    TERMINATED = "terminated"
    # The environment cuts the episode off.
    TRUNCATED = "truncated"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    # A turn called no tool: it is a tool agent's final answer.
    NO_ACTION = "no_action"
    ENV_ERROR = "env_error"
    # One call took longer than `env_timeout_seconds`.
    ENV_TIMEOUT = "env_timeout"
    # The server that samples turns could not be reached.
    SAMPLER_ERROR = "sampler_error"


# Reasons caused by environment or sampler, not by the agent.
FAILURES = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT, StopReason.SAMPLER_ERROR)
# Reasons after which no state follows: its value is 0 and is never bootstrapped.
FINAL = (StopReason.TERMINATED, StopReason.NO_ACTION, *FAILURES)
# Ends by an exhausted budget, whether or not the environment reports a success.
USED_UP = (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.TOKEN_BUDGET)


def culprit(reasons: Iterable[StopReason | None], source: str = "environment") -> str:
    """Return the name of the failed part for a message: the source, sampler, or one of the two."""
    failures = {reason for reason in reasons if reason in FAILURES}
    if StopReason.SAMPLER_ERROR not in failures:
        return source
    return "sampler" if len(failures) == 1 else f"{source} or sampler"


def cut_off_as_failed(
    success: Sequence[bool | None],
    stop_reasons: Sequence[str | None],
    env_types: Sequence[str | None],
    reporting: Collection[str | None],
) -> list[bool | None]:
    """Replace None in `success` by False for cut-off episodes, if their environment reports success.

    Without this an agent could raise its success rate by using up its turns. All arguments are per
    episode; `reporting` are the environments that have reported success or failure of any episode.
    """
    entries = zip(success, stop_reasons, env_types, strict=True)
    return [
        False if solved is None and reason in USED_UP and kind in reporting else solved
        for solved, reason, kind in entries
    ]


def check_reward(value: Any, name: str) -> float:
    """Return a reward as a finite float, or raise a ValueError that names the reward's source."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        # A longer text may be a row's; then equal errors would not be counted together.
        is_short = value is None or (isinstance(value, str) and len(value) <= 80)
        shown = f"a {type(value).__name__}"
        if is_short or hasattr(type(value), "__float__"):
            shown = f"{value!r:.80} ({shown})"
        raise ValueError(f"`{name}` must be a finite number; got {shown}.")
    return number


def spans_from_mask(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of ones in a mask, as half-open spans."""
    spans, start = [], None
    for position, flag in enumerate([*mask, 0]):
        if flag and start is None:
            start = position
        elif not flag and start is not None:
            spans.append((start, position))
            start = None
    return spans


def mask_from_spans(spans: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Return a mask of `length` tokens: 1 for each token inside a span, else 0."""
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
                f"`turn_spans[{episode}][{turn}]` is ({start}, {end}); allowed are half-open spans of the "
                f"completion with {previous} <= start < end <= {length}."
            )
        previous = end
