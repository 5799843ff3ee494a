"""The queue of turns in flight, shared by backends that pass turns on to another sampler."""

from __future__ import annotations

from .protocol import TurnRequest, TurnResult


class QueuedBackend:
    """Holds one turn per episode at a time, and at most `capacity` episodes.

    `capacity`: maximum number of episodes between `add` and `release`; None is any number.
    """

    version: int | None = None  # of the weights, as in `TurnResult`

    def __init__(self, *, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._episodes: set[int] = set()
        self._queue: dict[int, TurnRequest] = {}

    @property
    def busy(self) -> bool:
        """Whether any turn is in flight."""
        return bool(self._queue)

    def add(self, request: TurnRequest) -> None:
        """Queue a request."""
        key = request.key
        if request.max_new_tokens < 1:
            raise ValueError(f"Episode {key}: max_new_tokens={request.max_new_tokens}, not >= 1.")
        if key in self._queue:
            raise RuntimeError(f"Episode {key} already has a turn in flight.")
        full = self.capacity is not None and len(self._episodes) >= self.capacity
        if full and key not in self._episodes:
            raise RuntimeError(f"Episode {key} is one more than the {self.capacity} allowed.")
        self._episodes.add(key)
        self._queue[key] = request

    def release(self, key: int) -> None:
        """Forget an episode, and its turn if one is in flight; unknown keys are fine."""
        self._episodes.discard(key)
        self._queue.pop(key, None)


def cut(
    request: TurnRequest, ids: list[int], logprobs: list[float] | None, version: int | None = None
) -> TurnResult:
    """Cut a turn to its own limit."""
    if not ids:
        raise RuntimeError(f"The turn of episode {request.key} came back empty.")
    if logprobs is not None and len(logprobs) != len(ids):
        raise RuntimeError(f"Episode {request.key}: {len(ids)} tokens, {len(logprobs)} logprobs.")
    limit = request.max_new_tokens
    logprobs = None if logprobs is None else logprobs[:limit]
    return TurnResult(request.key, ids[:limit], logprobs, version=version)
