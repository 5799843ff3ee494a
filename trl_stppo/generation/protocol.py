"""The interface between a rollout and a sampler. A request is one turn of one episode.

A backend gets no messages or environments. One thread drives it: `add` as episodes become ready,
`step` until no turn is pending, `release` when an episode has ended.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TurnRequest:
    """Request to sample one turn.

    Attributes:
        key: number of the episode. Later requests extend the row of earlier requests, so a backend may
            cache the row's computations until `release`.
        ids: the row so far: the prompt and everything after it.
        max_new_tokens: at least 1.
        seed: The turn's seed: (seed, rollout, row, turn). If the backend supports it, equal seeds
            and equal rows sample equal tokens, whatever else is in flight.
        images: images of the row, in the order of their tokens.
    """

    key: int
    ids: list[int]
    max_new_tokens: int
    seed: tuple[int, ...]
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TurnResult:
    """One sampled turn.

    Attributes:
        ids: The sampled tokens, at least one, including the end-of-turn token if there is one.
        logprobs: log-probabilities of the sampled tokens in nats; None if the backend returns none.
        version: number of optimizer steps of the weights that sampled the turn; None if it is not known.
    """

    key: int
    ids: list[int]
    logprobs: list[float] | None
    version: int | None = None


class Backend:
    """Base class of samplers of turns.

    The caller has at most `capacity` episodes between `add` and `release`; None allows any number. `version`
    is that of its `TurnResult`s.
    """

    version: int | None = None
    # Whether each step samples one whole batch, so that the caller should let turns gather before a step.
    whole_batches = False

    def __init__(self, *, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._queue: dict[int, TurnRequest] = {}

    def running(self) -> AbstractContextManager[Any]:
        """Return the context manager of a whole rollout. In this class it does nothing."""
        return nullcontext()

    @property
    def busy(self) -> bool:
        """Return whether any turn is in flight."""
        return bool(self._queue)

    def add(self, request: TurnRequest) -> None:
        """Check a request and queue it. An episode has at most one request at a time."""
        key, limit, given = request.key, request.max_new_tokens, len(request.ids)
        if limit < 1 or not given:
            raise ValueError(f"Episode {key}: max_new_tokens={limit} after {given} tokens.")
        if key in self._queue:
            raise RuntimeError(f"Episode {key} already has a turn in flight.")
        self._queue[key] = request

    def step(self) -> list[TurnResult]:
        """Sample one token of each turn, or one whole batch of turns, and return the turns that ended."""
        raise NotImplementedError

    def release(self, key: int) -> None:
        """Drop an episode, and its turn if one is in flight. Unknown keys are ignored."""
        self._queue.pop(key, None)


def cut(
    request: TurnRequest, ids: list[int], logprobs: list[float] | None, version: int | None = None
) -> TurnResult:
    """Make the result of a sampled turn, cut to the limit of its request."""
    if not ids:
        raise RuntimeError(f"The turn of episode {request.key} came back empty.")
    if logprobs is not None and len(logprobs) != len(ids):
        raise RuntimeError(f"Episode {request.key}: {len(ids)} tokens, {len(logprobs)} logprobs.")
    limit = request.max_new_tokens
    logprobs = None if logprobs is None else logprobs[:limit]
    return TurnResult(request.key, ids[:limit], logprobs, version)
