"""Stop reasons and success of episodes, and the check of a reward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

from ..envs.base import finite


class StopReason(StrEnum):
    """The reason why an episode ended. Each ended episode has exactly one reason."""

    TERMINATED = "terminated"
    # The environment cuts the episode off.
    TRUNCATED = "truncated"
    MAX_TURNS = "max_turns"
    # `max_turn_tokens` cut off the episode's last turn.
    MAX_TURN_TOKENS = "max_turn_tokens"
    TOKEN_BUDGET = "token_budget"
    # A turn called no tool: it is a tool agent's final answer.
    NO_ACTION = "no_action"
    ENV_ERROR = "env_error"
    # One call took longer than `env_timeout_seconds`.
    ENV_TIMEOUT = "env_timeout"


# Reasons caused by the environment, not by the agent.
FAILURES = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)
# Reasons after which no state follows, so that the value after the episode is 0.
FINAL = (StopReason.TERMINATED, StopReason.NO_ACTION, *FAILURES)
# Reasons by which an exhausted budget ended the episode.
USED_UP = (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TURN_TOKENS, StopReason.TOKEN_BUDGET)


def cut_off_as_failed(episodes: Sequence[Any], reporting: Collection[str | None]) -> list[bool | None]:
    """Return each episode's `success`. After a cut-off None becomes False if the environment reports success.

    Otherwise an agent could raise its success rate by using up its turns. `reporting` are the environments
    that have reported success or failure of any episode.
    """
    return [
        False if e.success is None and e.stop_reason in USED_UP and e.env_type in reporting else e.success
        for e in episodes
    ]  # fmt: skip


def check_reward(value: Any, name: str) -> float:
    """Return a reward as a finite float, or raise a ValueError that names the reward's source."""
    number = finite(value)
    if number is None:
        raise ValueError(f"`{name}` must be a finite number; got {value!r:.80}.")
    return number
