"""A backend over a function that samples whole batches, such as `generate`."""

from __future__ import annotations

from collections.abc import Callable

from .protocol import TurnResult
from .queued import QueuedBackend, cut

# (rows of ids, max_new_tokens, seeds) -> (sampled ids of each row, their logprobs or None)
GenerateBatch = Callable[
    [list[list[int]], int, list[tuple[int, ...]]], tuple[list[list[int]], list[list[float]] | None]
]


class BatchedBackend(QueuedBackend):
    """Sends all queued turns as one batch with the largest limit, and cuts each to its own limit.

    `generate` may ignore the seeds; a `capacity` of None is any number of episodes.
    """

    # The caller should let turns gather before a step: each step is a batch of its own.
    whole_batches = True

    def __init__(self, generate: GenerateBatch, *, capacity: int | None = None) -> None:
        super().__init__(capacity=capacity)
        self._generate = generate

    def step(self) -> list[TurnResult]:
        """Sample all queued turns."""
        # Sorted by episode, so that a batch's samples do not depend on the speed of environments.
        requests, self._queue = [self._queue[key] for key in sorted(self._queue)], {}
        if not requests:
            return []
        limit = max(request.max_new_tokens for request in requests)
        rows = [request.ids for request in requests]
        ids, logprobs = self._generate(rows, limit, [request.seed for request in requests])
        if len(ids) != len(rows) or (logprobs is not None and len(logprobs) != len(rows)):
            raise RuntimeError(f"{len(rows)} turns were to be sampled; {len(ids)} came back.")
        per_row = [None] * len(rows) if logprobs is None else logprobs
        return [cut(*parts, self.version) for parts in zip(requests, ids, per_row, strict=True)]
