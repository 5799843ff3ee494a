"""Plays environments with actions in place of a model, and checks what they return."""

import asyncio
import inspect
import itertools
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._check_values import Step, check_number, check_opening, check_step, short
from .base import is_text_environment, taken_columns, tool_names

# A turn: a text, or a tool with its arguments.
Action = str | tuple[str, dict[str, Any]]


class HandPlayer:
    """Plays environments as a training does: in two threads by turns, `async` methods in one loop.

    Methods raise EnvironmentContractError if the environment raises or returns what is not allowed.
    """

    def __init__(self) -> None:
        # Two permanent threads: a new thread may get the number of an ended one.
        self._threads = itertools.cycle([ThreadPoolExecutor(1), ThreadPoolExecutor(1)])
        self._runner, self._made = asyncio.Runner(), list[Any]()

    def make(self, factory: Any) -> Any:
        """Return a new instance, which `close` closes."""
        try:
            env = factory()
        except Exception as error:
            what = f"The factory raised {_described(error)}"
            raise EnvironmentContractError(what) from error
        name = type(env).__name__
        if not callable(getattr(env, "reset", None)):
            raise EnvironmentContractError(f"{name} has no method `reset`.")
        if any(env is other for other in self._made):
            raise EnvironmentContractError(f"The factory returned the same {name} twice.")
        self._made.append(env)
        return env

    def close(self) -> None:
        """Close the instances that were made."""
        with self._runner:
            for env in self._made:
                if hasattr(env, "close") and "close" not in tools_of(env):
                    self.call(env, "close")

    def reset(self, env: Any, row: dict[str, Any]) -> str:
        """Start an episode; return the text."""
        is_text = is_text_environment(env)
        columns = taken_columns(env.reset, row, 0) if is_text else row
        result = self.call(env, "reset", **columns)
        return check_opening(f"{type(env).__name__}.reset", result, tools=not is_text)

    def play(self, env: Any, action: Action) -> Step:
        """Play a turn. The reward of a tool is what it adds to `turn_rewards`.

        Raises:
            KeyError: there is no such tool.
        """
        if isinstance(action, str):
            return check_step(f"{type(env).__name__}.step", self.call(env, "step", action))
        name, arguments = action
        if name not in tools_of(env):
            raise KeyError(f"{name!r} is no tool; allowed: {', '.join(tools_of(env)) or 'none'}.")
        before = sum(turn_rewards(env) or ())
        result = self.call(env, name, **arguments)
        return Step(result, sum(turn_rewards(env) or ()) - before, False, False, {})

    def final_reward(self, env: Any) -> float:
        """Return the reward of the whole episode, 0.0 without one."""
        if is_text_environment(env) or not callable(getattr(env, "get_reward", None)):
            return 0.0
        reward = self.call(env, "get_reward")
        name = f"{type(env).__name__}.get_reward returned"
        return 0.0 if reward is None else check_number(name, reward)

    def call(self, env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; an `async` one is awaited."""
        name, function = f"{type(env).__name__}.{method}", getattr(env, method)
        try:
            try:
                result = next(self._threads).submit(function, *args, **kwargs).result()
            except ValueError as error:
                if method not in tools_of(env) or "in main thread" not in str(error):
                    raise
                # As a training does with tools.
                result = function(*args, **kwargs)
            if inspect.iscoroutinefunction(function):
                result = self._runner.run(result)
        except Exception as error:
            values = [*map(short, args), *(f"{k}={short(v)}" for k, v in kwargs.items())]
            what = f"{name}({', '.join(values)}) raised {_described(error)}"
            raise EnvironmentContractError(what) from error
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise EnvironmentContractError(f"{name} returned an awaitable; use `async def`.")
        return result


def tools_of(env: Any) -> list[str]:
    """Return the names of an environment's tools, none for a text environment."""
    return [] if is_text_environment(env) else tool_names(env)


def turn_rewards(env: Any) -> list[Any] | None:
    """Return the checked rewards that tools add, or None if the environment has no such list."""
    rewards, name = getattr(env, "turn_rewards", None), f"{type(env).__name__}.turn_rewards"
    if not isinstance(rewards, list | None):
        raise EnvironmentContractError(f"{name} is {short(rewards)}; allowed: a list of floats.")
    for reward in rewards or ():
        check_number(f"{name} holds", reward)
    return rewards


def _described(error: Exception) -> str:
    """Return the type, the message and the place of an environment's exception."""
    place, cure = traceback.extract_tb(error.__traceback__)[-1], ""
    if "same thread" in str(error) or "main thread" in str(error):
        cure = "; a training calls from several threads. Set check_same_thread=False of sqlite3.connect, "
        cure += "or give environment_factory=isolated(...)."
    # A call that does not fit the signature fails in the thread's file.
    where = "" if "concurrent" in place.filename else f" ({place.filename}:{place.lineno})"
    return f"{type(error).__name__}: {error}{where}{cure}"
