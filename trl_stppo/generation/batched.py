"""Backends that call a function which samples whole batches of turns, such as `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable

from .protocol import Backend, TurnResult, cut

# (rows of ids, max_new_tokens, seeds) -> (sampled ids of each row, their logprobs or None). A fourth argument
# has the images of each row if there are any.
GenerateBatch = Callable[..., tuple[list[list[int]], list[list[float]] | None]]

# The argument has three numbers of this process: queued turns, largest limit, 1 if the process has finished.
# The result has the numbers of all processes.
Exchange = Callable[[tuple[int, int, int]], list[tuple[int, int, int]]]
# Pause in seconds after a round without a turn to generate.
PAUSE_SECONDS = 0.002


class BatchedBackend(Backend):
    """Backend that samples all queued turns as one batch, and cuts each turn to its own token limit.

    `generate` may ignore the seeds. A `capacity` of None allows any number of episodes.
    """

    whole_batches = True

    def __init__(self, generate: GenerateBatch, *, capacity: int | None = None) -> None:
        super().__init__(capacity=capacity)
        self._generate = generate

    def step(self) -> list[TurnResult]:
        """Sample all queued turns as one batch."""
        # Sort by episode, so that a batch's samples do not depend on the speed of environments.
        requests, self._queue = [self._queue[key] for key in sorted(self._queue)], {}
        if not requests:
            return []
        limit = max(request.max_new_tokens for request in requests)
        rows = [request.ids for request in requests]
        images = [request.images for request in requests]
        more = [images] if any(images) else []
        seeds = [request.seed for request in requests]
        ids, logprobs = self._generate(rows, limit, seeds, *more)
        if len(ids) != len(rows) or (logprobs is not None and len(logprobs) != len(rows)):
            raise RuntimeError(f"{len(rows)} turns were to be sampled; {len(ids)} came back.")
        per_row = [None] * len(rows) if logprobs is None else logprobs
        return [cut(*parts, self.version) for parts in zip(requests, ids, per_row, strict=True)]


class CollectiveBackend(BatchedBackend):
    """Backend whose `step` runs on all processes together.

    Processes whose episodes have different numbers of turns would otherwise deadlock, or get each other's
    completions: TRL's vLLM server mode, and colocated vLLM over several GPUs, gather the prompts of all
    processes and hand out equal slices.

    Processes with fewer turns than others add one-token prompts, whose completions are discarded, so
    that the slices are equal. `exchange` returns the values of all processes; it is a collective call
    itself.
    """

    def __init__(
        self,
        generate: GenerateBatch,
        exchange: Exchange,
        filler_id: int,
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__(self._generate_together, capacity=capacity)
        self._sample, self._exchange, self._filler_id = generate, exchange, filler_id
        self._rows = self._limit = 0

    @property
    def busy(self) -> bool:
        """Return True: another process may have turns to sample."""
        return True

    def step(self) -> list[TurnResult]:
        """Sample this process's queued turns in one round that all processes run together."""
        self._round(finished=False)
        return super().step()

    def finish(self) -> None:
        """Run rounds with no turn of this process, until all processes have finished."""
        while not self._round(finished=True):
            pass

    def _round(self, *, finished: bool) -> bool:
        """Agree on a round; sample only filler if no turn is queued. Return whether all have finished."""
        limits = [request.max_new_tokens for request in self._queue.values()]
        states = self._exchange((len(limits), max(limits, default=0), int(finished)))
        self._rows = max(queued for queued, _, _ in states)
        self._limit = max(limit for _, limit, _ in states)
        all_finished = all(done for _, _, done in states)
        if self._rows and not limits:
            self._generate_together([], 0, [])
        elif not self._rows and not all_finished:
            time.sleep(PAUSE_SECONDS)
        return all_finished

    def _generate_together(
        self, rows: list[list[int]], limit: int, seeds: list[tuple[int, ...]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        missing = self._rows - len(rows)
        filled = rows + [[self._filler_id]] * missing
        ids, logprobs = self._sample(filled, self._limit, seeds + [(0,)] * missing)
        if len(ids) != len(filled):
            raise RuntimeError(f"{len(filled)} turns were to be sampled; {len(ids)} came back.")
        return ids[: len(rows)], None if logprobs is None else logprobs[: len(rows)]
