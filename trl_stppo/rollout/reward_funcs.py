"""Wrappers of reward functions. They reject NaN and skip episodes whose environment failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .episode import Episode
from .record import check_reward

RewardFunc = Callable[..., Any]
# Columns that reward functions get under another name, or do not get.
RESERVED = ("prompt", "completion", "completion_ids")
# Arguments of every reward function, besides the columns of the rows.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class CurrentEpisodes:
    """Holds the episodes of the current call of reward functions.

    This package's own functions need more than TRL's arguments.
    """

    def __init__(self) -> None:
        self.episodes: Sequence[Episode] = ()

    @contextmanager
    def about(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Context manager that holds `episodes` while the reward functions are called with them."""
        self.episodes = episodes
        try:
            yield
        finally:
            self.episodes = ()


def guarded(func: RewardFunc, current: CurrentEpisodes) -> RewardFunc:
    """Wrap a reward function so that a NaN or infinite reward raises an error that names the function.

    Episodes that cannot be scored get `None`; the function is not called for them.

    `None` keeps its meaning ("does not apply to this row"); upstream turns it into NaN afterwards,
    so a NaN has to be detected before. Reward models and names pass unchanged.
    """
    if not is_function(func):
        return func

    async def asynchronous(**kwargs: Any) -> list[float | None]:
        kept, selected = _select(kwargs, current.episodes)
        with noted(func):
            rewards = checked(await func(**selected), func, len(kept)) if kept else []
        return _spread(rewards, kept, kwargs)

    def synchronous(**kwargs: Any) -> list[float | None]:
        kept, selected = _select(kwargs, current.episodes)
        with noted(func):
            rewards = checked(func(**selected), func, len(kept)) if kept else []
        return _spread(rewards, kept, kwargs)

    wrapper = functools.update_wrapper(asynchronous if is_async(func) else synchronous, func)
    wrapper.__name__ = name_of(func)
    return wrapper


def is_async(func: RewardFunc) -> bool:
    """Return whether `func` is a coroutine function, or an object with an asynchronous `__call__`."""
    return any(map(inspect.iscoroutinefunction, (func, type(func).__call__)))


def is_function(func: object) -> bool:
    """Return whether `func` is a function, not a reward model or a model's name."""
    return callable(func) and not isinstance(func, type) and not hasattr(func, "forward")


def name_of(func: RewardFunc) -> str:
    """Return the name of a user's reward function or tool. A partial has its function's name."""
    if isinstance(func, functools.partial):
        return name_of(func.func)
    return getattr(func, "__name__", type(func).__name__)


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names, with a number behind each repeated name: `f`, `f_2`."""
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [f"{n}_{k}" if k > 1 else n for n, k in zip(names, counts, strict=True)]


@contextmanager
def noted(func: RewardFunc) -> Iterator[None]:
    """Context manager that adds a reward function's name to its errors."""
    try:
        yield
    except Exception as error:
        note = f"in the reward function `{name_of(func)}`"
        error.add_note(note)
        # A TimeoutError has no text, and asyncio drops its notes.
        error.args = error.args or (note,)
        raise


def checked(rewards: Any, func: RewardFunc, count: int) -> list[float | None]:
    """Return the rewards of `count` completions as a list of finite numbers and None, or raise an error."""
    name, values = name_of(func), None
    if not isinstance(rewards, dict | str):
        with suppress(TypeError):
            values = list(rewards)
    if values is None:
        kind = type(rewards).__name__
        raise ValueError(f"`{name}` returned {rewards!r:.80} (a {kind}), not a list of {count} numbers.")
    pairs = enumerate(values)
    return [None if value is None else check_reward(value, f"{name}()[{i}]") for i, value in pairs]


def called(
    func: RewardFunc,
    rows: Sequence[dict[str, Any]],
    run_async: Callable[[Any], Any],
    **arguments: Any,
) -> list[float | None]:
    """Call a function with the columns of the rows and `arguments`; return one number or None per row."""
    columns = [key for key in rows[0] if key not in RESERVED]
    arguments = {key: [row[key] for row in rows] for key in columns} | arguments
    check_columns(func, arguments, columns)
    with noted(func):
        rewards = func(**arguments)
        if inspect.isawaitable(rewards):
            rewards = run_async(rewards)
    found = checked(rewards, func, len(rows))
    if len(found) != len(rows):
        raise ValueError(f"`{name_of(func)}` returned {len(found)} rewards for {len(rows)}.")
    return found


def check_columns(func: RewardFunc, arguments: Collection[str], columns: Collection[str]) -> None:
    """Raise TypeError if a reward function cannot be called with the available arguments."""
    missing, left = unmatched(func, arguments)
    if missing:
        raise TypeError(
            f"`{name_of(func)}` needs `{'`, `'.join(missing)}`; the rows have {', '.join(columns) or 'none'}."
        )
    if left:
        raise TypeError(
            f"`{name_of(func)}` does not take `{'`, `'.join(left)}`: add `**kwargs` to its parameters."
        )


def unmatched(func: RewardFunc, arguments: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the parameters that `arguments` lacks, and the arguments that `func` does not take."""
    # Read the decorated function's own signature, because its decorator may pass further arguments to the
    # inner function.
    parameters = inspect.signature(func, follow_wrapped=False).parameters
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    missing = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return missing, []
    return missing, [name for name in arguments if name not in named]


def _select(kwargs: dict[str, Any], episodes: Sequence[Episode]) -> tuple[list[int], dict[str, Any]]:
    """Return the rows whose episodes can be scored, and the arguments for these rows."""
    rows, left_out = len(kwargs["completions"]), {i for i, e in enumerate(episodes) if e.failed}
    kept = [row for row in range(rows) if row not in left_out]
    if len(kept) == rows:
        return kept, kwargs
    columns = {k: v for k, v in kwargs.items() if isinstance(v, list) and len(v) == rows}
    selected = kwargs | {name: [value[row] for row in kept] for name, value in columns.items()}
    if (log_extra := kwargs.get("log_extra")) is not None:
        # Spread the values, because a column of the completions table has an entry for every row.
        selected["log_extra"] = lambda column, values: log_extra(column, _spread(list(values), kept, kwargs))
    return kept, selected


def _spread(values: list[Any], kept: list[int], kwargs: dict[str, Any]) -> list[Any]:
    """Expand the values of the scored rows to all rows, with None for the other rows."""
    rows = len(kwargs["completions"])
    if len(values) != len(kept) or len(kept) == rows:
        # GRPOTrainer raises an error for a wrong number of values.
        return values
    by_row = dict(zip(kept, values, strict=True))
    return [by_row.get(row) for row in range(rows)]


def final_rewards_of(env_type: str, current: CurrentEpisodes) -> RewardFunc:
    """Make a reward function from the `get_reward` of one environment class. Other episodes get None."""

    def get_reward(completions: list[object], **kwargs: object) -> list[float | None]:
        return [e.final_reward if e.env_type == env_type else None for e in current.episodes]

    return get_reward


def turn_sums(current: CurrentEpisodes, without: float | None) -> RewardFunc:
    """Make a reward function: an episode's sum of turn rewards; `without` if no episode has any."""

    def turn_rewards(completions: list[object], **kwargs: object) -> list[float | None]:
        if not any(episode.has_turn_rewards for episode in current.episodes):
            return [without] * len(current.episodes)
        return [sum(episode.turn_rewards) for episode in current.episodes]

    return turn_rewards
