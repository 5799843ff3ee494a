"""Reward functions that refuse NaN, and are not asked about episodes whose environment failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .record import check_reward

RewardFunc = Callable[..., Any]


def guarded(func: RewardFunc, left_out: Callable[[], set[int]] = set) -> RewardFunc:
    """Wrap a reward function so that a NaN or infinite reward raises and names the function.

    Args:
        func: as GRPOTrainer takes it.
        left_out: rows of the current batch that have nothing to be scored; they get `None`.

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

        async def asynchronous(**kwargs: Any) -> list[float | None]:
            kept, selected = _select(kwargs, left_out())
            return _spread(checked(await func(**selected)) if kept else [], kept, kwargs)

        return _named_like(asynchronous, func, name)

    def synchronous(**kwargs: Any) -> list[float | None]:
        kept, selected = _select(kwargs, left_out())
        return _spread(checked(func(**selected)) if kept else [], kept, kwargs)

    return _named_like(synchronous, func, name)


def _select(kwargs: dict[str, Any], left_out: set[int]) -> tuple[list[int], dict[str, Any]]:
    """The rows that count, and the arguments for them."""
    rows = len(kwargs["completions"])
    kept = [row for row in range(rows) if row not in left_out]
    if len(kept) == rows:
        return kept, kwargs
    selected = {
        name: [value[row] for row in kept]
        if isinstance(value, list) and len(value) == rows
        else value
        for name, value in kwargs.items()
    }
    if (log_extra := kwargs.get("log_extra")) is not None:
        # A column of the completions table has an entry for every row.
        selected["log_extra"] = lambda column, values: log_extra(
            column, _spread(list(values), kept, kwargs)
        )
    return kept, selected


def _spread(values: list[Any], kept: list[int], kwargs: dict[str, Any]) -> list[Any]:
    """Values of the rows that count, None for the others."""
    rows = len(kwargs["completions"])
    if len(values) != len(kept) or len(kept) == rows:
        return values  # a wrong number is for GRPOTrainer to explain
    by_row = dict(zip(kept, values, strict=True))
    return [by_row.get(row) for row in range(rows)]


def _named_like(wrapper: RewardFunc, func: RewardFunc, name: str) -> RewardFunc:
    functools.update_wrapper(wrapper, func)
    wrapper.__name__ = name
    return wrapper
