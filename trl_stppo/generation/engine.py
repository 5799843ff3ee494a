"""Backends over an engine that batches turns itself, such as vLLM's, in this process or behind a server."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from .protocol import Backend, TurnRequest, TurnResult, cut

# Longest time in seconds that a step blocks for a turn of a server; environments run in the meantime.
WAIT_SECONDS = 0.005


class EngineBackend(Backend):
    """Backend that sends each turn to the engine as a request, and returns each turn as soon as it ends.

    `engine` has `add_request`, `step` and `abort_request` of vLLM's `LLMEngine`. `options` returns the
    options of `add_request` for a turn: `params`, and `lora_request` if an adapter samples.
    """

    def __init__(
        self,
        engine: Any,
        options: Callable[[TurnRequest], dict[str, Any]],
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__(capacity=capacity)
        self._engine, self._options = engine, options
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}

    def add(self, request: TurnRequest) -> None:
        """Send a turn to the engine. The engine starts the turn in its next step."""
        super().add(request)
        name, prompt = f"{request.key}:{next(self._numbers)}", {"prompt_token_ids": request.ids}
        self._engine.add_request(name, prompt, **self._options(request))
        self._names[request.key] = name

    def step(self) -> list[TurnResult]:
        """Run one step of the engine, which samples a token of each turn, and return the turns that ended."""
        if not self._queue:
            return []
        return [self._result(output) for output in self._engine.step() if output.finished]

    def _result(self, output: Any) -> TurnResult:
        key = int(output.request_id.partition(":")[0])
        del self._names[key]
        turn = output.outputs[0]
        ids = list(turn.token_ids)
        logprobs = [at[token].logprob for at, token in zip(turn.logprobs, ids, strict=True)]
        return cut(self._queue.pop(key), ids, logprobs, self.version)

    def release(self, key: int) -> None:
        """Drop an episode, and abort its turn if one is being sampled. Unknown keys are ignored."""
        super().release(key)
        name = self._names.pop(key, None)
        if name is not None:
            self._engine.abort_request([name])


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
