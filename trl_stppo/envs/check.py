"""Checks an environment against the contract before a training run finds out.

Violations raise; what is allowed but usually a mistake comes back as a list of warnings.
"""

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ._check_session import Session, check_reset_signature, global_generators, pickling_smell
from ._check_text import check_text
from ._check_tools import check_tools
from ._check_values import short, violation
from .base import is_text_environment, without_prompt

MAX_ROWS = 8


def check_env(
    env_or_factory: Any,
    rows: Iterable[dict[str, Any]] | None = None,
    *,
    actions: Sequence[Any] | None = None,
    steps: int = 20,
    seed: int = 0,
) -> list[str]:
    """Play an environment and look for whatever would break or spoil a training run.

    Works for text environments (`reset`, `step`) and for TRL's tool environments, synchronous or
    not. The global random generators are left as they were.

    Args:
        env_or_factory: what `environment_factory` gets (a class, a function, a partial), or an
            instance. Only with a factory can it be seen whether instances share state.
        rows: rows of the data set, of which the first 8 are played; None for one row with `prompt`
            and `seed`.
        actions: what is played, from the start again when it is used up: texts for a text
            environment, `(tool, arguments)` for a tool environment. The more of a game they reach,
            the more is seen. None plays a few texts, and calls no tool.
        steps: turns of an episode at most.
        seed: the column `seed` of the row that is made up if there are none.

    Returns:
        The warnings, which are also issued as `UserWarning`; empty for a clean environment.

    Raises:
        EnvironmentContractError: the environment breaks the contract.
        ValueError: there is no row, or an action names an unknown tool.
    """
    made_up = [{"prompt": [{"role": "user", "content": ""}], "seed": seed}]
    played = list(itertools.islice(rows, MAX_ROWS)) if rows is not None else made_up
    if not played:
        raise ValueError("rows is empty; pass at least one row, or None.")
    if _a_loop_runs():  # as in a notebook: it cannot be entered a second time
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(_check, env_or_factory, played, actions, steps).result()
    else:
        found = _check(env_or_factory, played, actions, steps)
    columns = dict.fromkeys(column for row in played for column in row)
    found += filter(None, [without_prompt("rows", columns)])
    for message in found:
        warnings.warn(message, stacklevel=2)
    return found


def _a_loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check(
    env_or_factory: Any, rows: list[dict[str, Any]], actions: Sequence[Any] | None, steps: int
) -> list[str]:
    # A class has the attribute `reset` too, but is there to be called.
    several = isinstance(env_or_factory, type) or not hasattr(env_or_factory, "reset")
    made: list[Any] = []
    make = _making(env_or_factory, made) if several else lambda: env_or_factory
    outside = {name: state() for name, (_, state, *_) in global_generators().items()}
    with asyncio.Runner() as runner:
        session = Session(make, runner)
        try:
            try:
                _check_instance(session, rows, actions, steps, several=several)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to show
                    _close(session, made)
                raise
            _close(session, made)
            if several and (smell := pickling_smell(env_or_factory)):
                session.warn(smell)
            session.warn_if_slow()
        finally:
            for name, (_, _, restore, _) in global_generators().items():
                if name in outside:
                    restore(outside[name])
    return session.warnings


def _close(session: Session, made: list[Any]) -> None:
    for env in made:
        # A tool environment's public methods are its tools.
        if is_text_environment(env) and callable(getattr(env, "close", None)):
            session.call(env, "close")


def _making(factory: Callable[[], Any], made: list[Any]) -> Callable[[], Any]:
    """The factory, watched."""
    if not callable(factory):
        raise violation(
            f"environment_factory is {short(factory)}",
            "a callable without arguments, or an environment",
            "an object that lacks `reset`",
            "pass the class, or functools.partial(Class, ...)",
        )

    def make() -> Any:
        try:
            env = factory()
        except Exception as error:
            raise violation(
                f"The factory raised {type(error).__name__}: {error}",
                "a call without arguments that returns a new environment",
                "arguments that are missing, or a package that is not installed",
                "bind the arguments with functools.partial",
            ) from error
        if any(env is other for other in made):
            raise violation(
                f"The factory returned the same {type(env).__name__} twice",
                "a new environment on every call",
                "an instance that was made outside of the factory",
                "make it inside",
            )
        made.append(env)
        return env

    return make


def _check_instance(
    session: Session,
    rows: list[dict[str, Any]],
    actions: Sequence[Any] | None,
    steps: int,
    *,
    several: bool,
) -> None:
    env = session.make()
    name = type(env).__name__
    if not callable(getattr(env, "reset", None)):
        raise violation(
            f"{name} has no method reset",
            "reset(**row), and step(action) or tools",
            "the factory returns something else than the environment, such as None or a coroutine",
            "define reset, and let the factory return the instance",
        )
    if hasattr(env, "close") and not callable(env.close):
        raise violation(
            f"{name}.close is {short(env.close)}",
            "a method, or nothing of that name",
            "an attribute that happens to be called close",
            "rename it",
        )
    for row in rows:
        smell = check_reset_signature(env, row)
        if smell:
            session.warn(smell)
    if is_text_environment(env):
        check_text(session, env, rows, actions, steps, several=several)
    else:
        check_tools(session, env, rows, actions, several=several)
