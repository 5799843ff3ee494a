"""Reward functions that refuse NaN, and are not asked about episodes whose environment failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .episode import Episode
from .record import check_reward

RewardFunc = Callable[..., Any]
# What every reward function is asked with, besides the columns of the rows.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class Asked:
    """The episodes that reward functions are being asked about.

    Our own functions need more of them than the arguments that TRL gives to all.
    """

    def __init__(self) -> None:
        self.episodes: Sequence[Episode] = ()

    @contextmanager
    def about(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Around the call that asks."""
        self.episodes = episodes
        try:
            yield
        finally:
            self.episodes = ()


def guarded(func: RewardFunc, asked: Asked) -> RewardFunc:
    """Wrap a reward function so that a NaN or infinite reward raises and names the function.

    Episodes that leave nothing to be scored get `None` without being shown.

    `None` keeps its meaning ("does not apply to this row"); upstream turns it into NaN afterwards,
    where the two could no longer be told apart. Reward models and names pass unchanged.
    """
    if not is_function(func):
        return func
    name = name_of(func)

    def checked(rewards: Any, count: int) -> list[float | None]:
        return [
            None if reward is None else check_reward(reward, f"{name}()[{i}]")
            for i, reward in enumerate(listed(rewards, name, count))
        ]

    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
        getattr(func, "__call__", None)  # noqa: B004
    ):

        async def asynchronous(**kwargs: Any) -> list[float | None]:
            kept, selected = _select(kwargs, asked.episodes)
            check_columns(func, selected, _columns(kwargs))
            rewards = checked(await func(**selected), len(kept)) if kept else []
            return _spread(rewards, kept, kwargs)

        return _named_like(asynchronous, func, name)

    def synchronous(**kwargs: Any) -> list[float | None]:
        kept, selected = _select(kwargs, asked.episodes)
        check_columns(func, selected, _columns(kwargs))
        return _spread(checked(func(**selected), len(kept)) if kept else [], kept, kwargs)

    return _named_like(synchronous, func, name)


def is_function(func: Any) -> bool:
    """Whether it is a function, and no model or name of one."""
    return callable(func) and not isinstance(func, type) and not hasattr(func, "forward")


def name_of(func: Callable[..., Any]) -> str:
    """What a function of the user's is called: a reward, or a tool."""
    return getattr(func, "__name__", type(func).__name__)


def listed(rewards: Any, name: str, count: int) -> list[Any]:
    """The rewards that a function has returned, which may be of any kind that can be gone through."""
    if not isinstance(rewards, dict | str):
        with suppress(TypeError):
            return list(rewards)
    raise ValueError(
        f"The reward function `{name}` returned {rewards!r} (a {type(rewards).__name__}) for {count} "
        f"completions. Return a list with a number for each of them, or None where it does not apply."
    )


def check_columns(func: RewardFunc, arguments: Collection[str], columns: Collection[str]) -> None:
    """Refuse a reward function that cannot be called with what there is, before it is."""
    missing, left = unmatched(func, arguments)
    if missing:
        raise TypeError(
            f"The reward function `{name_of(func)}` needs `{'`, `'.join(missing)}`; besides the prompt "
            f"the rows have {', '.join(columns) or 'none'}."
        )
    if left:
        raise TypeError(
            f"The reward function `{name_of(func)}` does not take `{'`, `'.join(left)}`: it gets every "
            f"column of the rows, and {', '.join(GIVEN)}. Add `**kwargs` to its parameters."
        )


def unmatched(func: Callable[..., Any], arguments: Collection[str]) -> tuple[list[str], list[str]]:
    """Parameters that need an argument and get none of these, and arguments that `func` does not take."""
    try:
        # A decorator may add what the function below it needs.
        parameters = inspect.signature(func, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # a compiled function tells none
        return [], []
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    missing = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return missing, []
    return missing, [name for name in arguments if name not in named]


def _columns(kwargs: dict[str, Any]) -> list[str]:
    return [name for name in kwargs if name not in (*GIVEN, "environments")]


def _select(
    kwargs: dict[str, Any], episodes: Sequence[Episode]
) -> tuple[list[int], dict[str, Any]]:
    """The rows that count, and the arguments for them."""
    rows, left_out = len(kwargs["completions"]), {i for i, e in enumerate(episodes) if e.failed}
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


def paid_by(env_type: str, asked: Asked) -> RewardFunc:
    """A reward function: what `get_reward` of the environments of one class has returned."""

    def get_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [e.final_reward if e.env_type == env_type else None for e in asked.episodes]

    return get_reward


def turn_sums(asked: Asked, unpaid: float | None) -> RewardFunc:
    """A reward function that repeats, for the log, what the turns of each episode have earned.

    `unpaid`: what it says if nobody has paid a turn.
    """

    def turn_rewards(completions: list[Any], **kwargs: Any) -> list[float | None]:
        if not any(episode.pays_turns for episode in asked.episodes):
            return [unpaid] * len(asked.episodes)
        return [sum(episode.turn_rewards) for episode in asked.episodes]

    return turn_rewards
