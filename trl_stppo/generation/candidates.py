"""A backend that samples each turn several times with another backend and returns the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .protocol import Backend, TurnRequest, TurnResult

# Requests with the turns sampled for each -> per request, the number of the turn to play.
Choose = Callable[[list[tuple[TurnRequest, list[TurnResult]]]], list[int]]


class CandidatesBackend:
    """Backend that samples `candidates` turns with `backend` for each requested turn, and returns the best.

    An episode counts as `candidates` episodes in `backend`. `choose` selects the candidates to play, for
    all episodes whose candidates are complete.
    """

    def __init__(self, backend: Backend, candidates: int, choose: Choose) -> None:
        self._backend, self._candidates, self._choose = backend, candidates, choose
        room = backend.capacity
        self.capacity = None if room is None else max(1, room // candidates)
        self.whole_batches = getattr(backend, "whole_batches", False)
        self._requests: dict[int, TurnRequest] = {}
        self._sampled: dict[int, dict[int, TurnResult]] = {}

    @property
    def busy(self) -> bool:
        """Whether the inner backend has work to do."""
        return self._backend.busy

    def add(self, request: TurnRequest) -> None:
        """Request the turn's candidates from the inner backend, each with another seed."""
        self._requests[request.key], self._sampled[request.key] = request, {}
        for number, key in enumerate(self._keys(request.key)):
            seed = (*request.seed, number)
            self._backend.add(dataclasses.replace(request, key=key, seed=seed))

    def step(self) -> list[TurnResult]:
        """Run a step of the inner backend. Return the best turn of each request with complete candidates."""
        complete = []
        for result in self._backend.step():
            key, number = divmod(result.key, self._candidates)
            self._sampled[key][number] = result
            if len(self._sampled[key]) == self._candidates:
                complete.append(key)
        if not complete:
            return []
        turns = [(self._requests.pop(key), self._turns(key)) for key in complete]
        return [
            self._played(request.key, results, best)
            for (request, results), best in zip(turns, self._choose(turns), strict=True)
        ]

    def release(self, key: int) -> None:
        """Drop an episode and all its candidates. Unknown keys are ignored."""
        self._requests.pop(key, None)
        self._sampled.pop(key, None)
        for each in self._keys(key):
            self._backend.release(each)

    def _keys(self, key: int) -> range:
        return range(key * self._candidates, (key + 1) * self._candidates)

    def _turns(self, key: int) -> list[TurnResult]:
        sampled = self._sampled.pop(key)
        return [sampled[number] for number in range(self._candidates)]

    def _played(self, key: int, results: list[TurnResult], best: int) -> TurnResult:
        for number, each in enumerate(self._keys(key)):
            if number != best:  # the row does not continue with that candidate
                self._backend.release(each)
        return dataclasses.replace(results[best], key=key)
