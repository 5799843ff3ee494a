"""A backend over a function that samples whole batches, such as an engine's or `generate`."""

from __future__ import annotations

from collections.abc import Callable

from .protocol import TurnRequest, TurnResult

# (rows of ids, max_new_tokens, seeds) -> (sampled ids of each row, their logprobs or None)
GenerateBatch = Callable[
    [list[list[int]], int, list[tuple[int, ...]]],
    tuple[list[list[int]], list[list[float]] | None],
]


class BatchedBackend:
    """Sends all that is queued as one batch, with the largest limit, and cuts each to its own.

    Args:
        generate: samples a batch. It may ignore the seeds.
        capacity: how many episodes may be between `add` and `release`; None is any number.
    """

    # Whoever drives it should let turns gather before a step: each step is a batch of its own.
    whole_batches = True

    def __init__(self, generate: GenerateBatch, *, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._generate = generate
        self._episodes: set[int] = set()
        self._queue: dict[int, TurnRequest] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is queued."""
        return bool(self._queue)

    def add(self, request: TurnRequest) -> None:
        """Queue a request.

        Raises:
            RuntimeError: the episode has one already, or there are `capacity` others.
            ValueError: `max_new_tokens` is below 1.
        """
        key = request.key
        if request.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens of episode {key} is {request.max_new_tokens}, not >= 1."
            )
        if key in self._queue:
            raise RuntimeError(f"Episode {key} already has a turn in flight.")
        full = self.capacity is not None and len(self._episodes) >= self.capacity
        if full and key not in self._episodes:
            raise RuntimeError(
                f"Episode {key} is one more than the {self.capacity} allowed at once."
            )
        self._episodes.add(key)
        self._queue[key] = request

    def step(self) -> list[TurnResult]:
        """Sample all queued turns.

        Raises:
            RuntimeError: the function returned another number of rows, or an empty one.
        """
        # By episode: what a batch draws does not depend on whose environment was faster.
        requests, self._queue = [self._queue[key] for key in sorted(self._queue)], {}
        if not requests:
            return []
        limit = max(request.max_new_tokens for request in requests)
        rows = [request.ids for request in requests]
        ids, logprobs = self._generate(rows, limit, [request.seed for request in requests])
        if len(ids) != len(rows) or (logprobs is not None and len(logprobs) != len(rows)):
            raise RuntimeError(f"{len(rows)} turns were to be sampled; {len(ids)} came back.")
        per_row = [None] * len(rows) if logprobs is None else logprobs
        return [_cut(*parts) for parts in zip(requests, ids, per_row, strict=True)]

    def release(self, key: int) -> None:
        """Forget an episode, and its request if one is queued; unknown keys are fine."""
        self._episodes.discard(key)
        self._queue.pop(key, None)


def _cut(request: TurnRequest, ids: list[int], logprobs: list[float] | None) -> TurnResult:
    if not ids:
        raise RuntimeError(
            f"The turn of episode {request.key} came back empty; a turn has at least one token, "
            "its end-of-turn token included."
        )
    if logprobs is not None and len(logprobs) != len(ids):
        raise RuntimeError(
            f"The turn of episode {request.key} has {len(ids)} tokens but {len(logprobs)} logprobs."
        )
    limit = request.max_new_tokens
    return TurnResult(request.key, ids[:limit], None if logprobs is None else logprobs[:limit])
