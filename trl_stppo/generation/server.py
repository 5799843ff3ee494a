"""A backend over a server that may stop, restart or return errors. Each turn is a separate request."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ..threads import DaemonThread
from .protocol import Backend, TurnRequest, TurnResult, cut

logger = logging.getLogger(__name__)

# Longest time in seconds that a step blocks for a turn; environments run in the meantime.
WAIT_SECONDS = 0.005
# Attempts per turn whose request fails, and the pause between two attempts, in seconds.
TRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0


class ServerError(Exception):
    """Error of a server that has not sampled a turn. A repeated request may succeed.

    `unreachable`: the server is down or too busy, so the error does not come from this turn.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class ServerBackend(Backend):
    """Backend that requests each turn on a separate thread, and retries after a temporary failure.

    A turn counts if the server had the right weights before and after it. A turn without an answer within
    `patience` seconds, or with only failed requests, gets a result with an `error`.

    Args:
        server: has `sample(request)`, which returns ids and logprobs or None, and `weights_name()`, a name
            that a restart changes. It raises ServerError.
        weights: name of the current weights, `update#push`.
        patience: longest time in seconds that the server may be away.
        send_weights: sends weights to a restarted server and returns their name; None if it cannot send.
        awaits_weights: whether another process sends weights to a restarted server.
        warned: whether the warning about repeated requests was logged before.
        capacity: as in `Backend`.
    """

    def __init__(
        self,
        server: Any,
        weights: str,
        *,
        patience: float,
        send_weights: Callable[[], str] | None = None,
        awaits_weights: bool = True,
        warned: bool = False,
        capacity: int | None = None,
    ) -> None:
        super().__init__(capacity=capacity)
        self._server, self._weights, self._patience = server, weights, patience
        self._send_weights, self._awaits_weights = send_weights, awaits_weights
        self._answers = queue.SimpleQueue[tuple[TurnRequest, TurnResult | BaseException]]()
        # Set when the server no longer has the weights.
        self._lost = threading.Event()
        self._away_since: float | None = None
        self._warned = warned
        self.retries = 0

    @property
    def has_lost(self) -> bool:
        """Return whether the server has lost the policy's weights and not received them again."""
        return self._lost.is_set()

    def add(self, request: TurnRequest) -> None:
        """Queue a turn and send its request."""
        super().add(request)
        DaemonThread(self._work, "turn", request).start()

    def step(self) -> list[TurnResult]:
        """Return the turns sampled since the last call. If there are none, block for a few milliseconds."""
        if self._lost.is_set() and self._send_weights is not None:
            try:
                self._weights = self._send_weights()
            except ServerError as error:
                # The server is unreachable again, so its pending turns time out.
                logger.debug("weights were not sent: %s", error)
            else:
                self._lost.clear()
                logger.warning("The vLLM server was restarted; it has the policy's weights again.")
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
            answer = self._sample(request)
        except BaseException as error:
            answer = error
        self._answers.put((request, answer))

    def _sample(self, request: TurnRequest) -> TurnResult:
        pause, failures, began = FIRST_PAUSE, 0, time.monotonic()
        while True:
            weights = self._weights
            try:
                self._check(weights)
                ids, logprobs = self._server.sample(request)
                self._check(weights)
            except ServerError as raised:
                error = raised
            else:
                self._away_since = None
                return cut(request, ids, logprobs, self.version)
            failures += not error.unreachable
            # Each turn also has its own limit, because answers to other turns reset `_away_since`.
            starves = time.monotonic() - began > TRIES * self._patience and error.unreachable
            released = self._queue.get(request.key) is not request
            if released or self._gives_up(error, failures) or starves:
                return TurnResult(request.key, [], None, str(error))
            self._warn(error)
            self.retries += 1
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check(self, weights: str) -> None:
        present = self._server.weights_name()
        if present == weights:
            return
        if present.partition("#")[0] == weights.partition("#")[0]:
            # Another process has sent the weights again.
            self._weights = present
        elif self._weights == weights:
            self._lost.set()
        message = f"it has the weights {present!r} instead of {weights!r}: it was restarted"
        raise ServerError(message, unreachable=self._awaits_weights)

    def _gives_up(self, error: ServerError, failures: int) -> bool:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if error.unreachable:
            return now - self._away_since > self._patience
        return failures >= TRIES

    def _warn(self, error: ServerError) -> None:
        if not self._warned:
            self._warned = True
            text = "The vLLM server has not sampled a turn (%s). Turns are requested again, for up to %g s."
            logger.warning(text, error, self._patience)
