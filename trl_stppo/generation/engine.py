"""A backend over an engine in this process that batches turns itself, such as vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .protocol import Backend, TurnRequest, TurnResult, cut


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
        """Send a turn to the engine, which starts it with its next step."""
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
