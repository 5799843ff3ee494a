"""Plays text environments: `reset(**row)` and `step(action)`, synchronous or asynchronous."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..envs._check_values import check_opening, check_step
from ..envs.base import taken_columns
from .chat import Message
from .driver import Call, Driver, Opening, Outcome, trusts
from .environments import EnvironmentPool
from .episode import Episode
from .messages import readable


class TextDriver(Driver):
    """Driver of the text environments of one factory.

    The methods of instances that live in processes of their own are synchronous here.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        name: str | None,
        probe: Any,
        decode: Callable[[list[int]], str],
        run_async: Callable[[Any], Any],
    ) -> None:
        isolated = pool.isolates(name)
        self.tools: list[Any] = []
        self.type_name, self.trusted_text = type(probe).__name__, trusts(probe)
        self._pool, self._name = pool, name
        self._decode, self._run_async = decode, run_async
        self._reset_async = inspect.iscoroutinefunction(probe.reset) and not isolated
        render = getattr(probe, "render", None)
        self._renders = callable(render) and not inspect.iscoroutinefunction(render)
        self._step_async = inspect.iscoroutinefunction(probe.step) and not isolated
        self._reset = probe.reset

    def opening(self, episode: Episode, seed: int) -> Call:
        """Return the call that resets the environment with the row's columns that its `reset` accepts."""
        columns = taken_columns(self._reset, episode.columns, seed)
        # This holds also if `reset` fails.
        episode.has_turn_rewards = True

        def opening() -> Opening:
            env = self._pool.take(self._name, episode.instance)
            result = env.reset(**columns)
            if self._reset_async:
                result = self._run_async(result)
            # A training reads no info.
            result = result[0] if isinstance(result, tuple) and len(result) == 2 else result
            observation = check_opening(f"{self.type_name}.reset", result, tools=False)
            return Opening(env, readable(observation), picture=self._picture(env))

        return opening

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """Return the turn's text as an assistant message."""
        return {"role": "assistant", "content": self._decode(ids)}

    def turn(self, episode: Episode, message: Message) -> Call:
        """Return the call that steps the environment with the turn's text."""
        env, action = episode.env, message["content"]

        def stepping() -> Outcome:
            result = env.step(action)
            if self._step_async:
                result = self._run_async(result)
            step = check_step(f"{self.type_name}.step", result, strict=False)
            valid, success = step.info.get("valid_action"), step.info.get("success")
            return Outcome(
                [{"role": "user", "content": readable(step.observation)}],
                step.reward,
                step.terminated,
                step.truncated,
                None if valid is None else bool(valid),
                None if success is None else bool(success),
                self._picture(env),
            )

        return stepping

    def _picture(self, env: Any) -> str | None:
        """Return the text or SVG of the environment's `render`; an error becomes the text."""
        if not self._renders:
            return None
        try:
            picture = env.render()
        except Exception as error:
            picture = f"{self.type_name}.render raised {error!r}"
        return readable(picture) if isinstance(picture, str) else None
