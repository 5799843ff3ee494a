"""A backend over a server. Each turn is a separate request on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from .protocol import Backend, TurnRequest, TurnResult, cut

# Longest time in seconds that a step blocks for a turn; environments run in the meantime.
WAIT_SECONDS = 0.005


class ServerBackend(Backend):
    """Backend that requests each turn on a separate thread; `step` raises the error of a failed request.

    `sample` returns a turn's token ids and their log-probabilities.
    """

    def __init__(
        self,
        sample: Callable[[TurnRequest], tuple[list[int], list[float] | None]],
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__(capacity=capacity)
        self._sample = sample
        self._answers = queue.SimpleQueue[tuple[TurnRequest, TurnResult | BaseException]]()

    def add(self, request: TurnRequest) -> None:
        """Queue a turn and send its request."""
        super().add(request)
        threading.Thread(target=self._work, args=(request,), name="turn", daemon=True).start()

    def step(self) -> list[TurnResult]:
        """Return the turns sampled since the last call. If there are none, block for a few milliseconds."""
        results = []
        try:
            request, answer = self._answers.get(timeout=WAIT_SECONDS)
            while True:
                # Drop the answer to a request that was released in the meantime.
                if self._queue.get(request.key) is request:
                    del self._queue[request.key]
                    if isinstance(answer, BaseException):
                        raise answer
                    results.append(answer)
                request, answer = self._answers.get_nowait()
        except queue.Empty:
            return results

    def _work(self, request: TurnRequest) -> None:
        answer: TurnResult | BaseException
        try:
            answer = cut(request, *self._sample(request), self.version)
        except BaseException as error:
            answer = error
        self._answers.put((request, answer))
