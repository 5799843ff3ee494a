"""What the rollout asks of whoever samples tokens: one turn of one episode, many in flight.

A backend never sees messages or environments. It is driven from one thread: `add` as episodes
become ready, `step` until nothing is pending, `release` when an episode has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TurnRequest:
    """One turn to be sampled."""

    # The episode. Its later requests extend the row of its earlier ones, so a backend may keep what
    # it has computed for it until `release`.
    key: int
    ids: list[int]  # the whole row so far: the prompt and everything after it
    max_new_tokens: int  # at least 1
    # Names the turn's randomness, (seed, rollout, row, turn). Equal seeds and equal rows sample
    # equal tokens, whatever else is in flight, where the backend can promise it.
    seed: tuple[int, ...]


@dataclass(frozen=True)
class TurnResult:
    """One sampled turn."""

    key: int  # as in the request
    # The sampled tokens, at least one, the end-of-turn token included where there is one.
    ids: list[int]
    # Of the sampled tokens in nats, one each, or None if the backend does not tell.
    logprobs: list[float] | None
    # Why the turn could not be sampled, which ends its episode; `ids` is empty then.
    error: str | None = None


class Backend(Protocol):
    """Samples turns. `capacity` bounds how many episodes may be between `add` and `release`."""

    capacity: int | None

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def add(self, request: TurnRequest) -> None:
        """Take a request; an episode has at most one at a time."""
        ...

    def step(self) -> list[TurnResult]:
        """Work for a while (one token of each turn, or one batch) and return the turns that ended."""
        ...

    def release(self, key: int) -> None:
        """Forget an episode, in the middle of a turn too; unknown keys are fine."""
        ...
