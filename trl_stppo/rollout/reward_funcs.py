"""Reward functions that refuse NaN, and one that reports what an environment has paid."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .record import check_reward

RewardFunc = Callable[..., Any]


def refuse_nan(func: RewardFunc) -> RewardFunc:
    """Wrap a reward function so that a NaN or infinite reward raises and names the function.

    `None` keeps its meaning ("does not apply to this row"); upstream turns it into NaN afterwards,
    where the two could no longer be told apart. Reward models and names pass unchanged.
    """
    if not callable(func) or isinstance(func, type) or hasattr(func, "forward"):
        return func
    name = getattr(func, "__name__", type(func).__name__)

    def checked(rewards: Any) -> list[float | None]:
        return [
            None if reward is None else check_reward(reward, f"{name}()[{i}]")
            for i, reward in enumerate(rewards)
        ]

    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
        getattr(func, "__call__", None)  # noqa: B004
    ):

        async def asynchronous(*args: Any, **kwargs: Any) -> list[float | None]:
            return checked(await func(*args, **kwargs))

        return _named_like(asynchronous, func, name)

    def synchronous(*args: Any, **kwargs: Any) -> list[float | None]:
        return checked(func(*args, **kwargs))

    return _named_like(synchronous, func, name)


def _named_like(wrapper: RewardFunc, func: RewardFunc, name: str) -> RewardFunc:
    functools.update_wrapper(wrapper, func)
    wrapper.__name__ = name
    return wrapper
