"""Calls into the environment under check: timed, awaited, with errors that name the method."""

import asyncio
import inspect
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._check_values import short, violation

SLOW_SECONDS = 1.0

# method -> what is allowed, likely cause, fix
_NOT_TO_RAISE = {
    "step": (
        "no exception, whatever the model writes",
        "a text that the environment cannot read",
        'answer with a reminder and info {"valid_action": False}',
    ),
    "reset": (
        "no exception on a row of the data set",
        "a column that the row lacks, or what a former episode left behind",
        "pass rows=[...] like those of the data set, and set all state anew in reset",
    ),
    "other": (
        "no exception",
        "something that exists only during an episode",
        "create it in __init__",
    ),
}

_OF_ONE_THREAD = (
    "calls that come from different threads, one at a time, as those of a training do",
    "something that only the thread may use that made it, as a connection of sqlite3",
    'sqlite3.connect(..., check_same_thread=False), or env_isolation="process"',
)

# name -> (fingerprint, state, restore, seed)
Generators = dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any], Any]]


def _elsewhere(function: Callable[[], Any], is_tool: bool) -> Any:
    """Call it on a thread of its own: in a training reset and step come from different ones, too."""
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    try:
        return outcome.result()
    except ValueError as error:
        if is_tool and "only works in main thread" in str(error):
            return function()  # as a training does with tools
        raise


class Session:
    """One run of the checker.

    Args:
        make: makes an instance.
        runner: the event loop of all awaited calls, since an environment may hold on to it.
    """

    def __init__(self, make: Callable[[], Any], runner: "asyncio.Runner") -> None:
        self.make = make
        self.warnings: list[str] = []
        self._runner = runner
        self._seconds: dict[str, list[float]] = {}

    def warn(self, message: str) -> None:
        """Keep a smell, once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def run(self, env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and await it if it is declared `async`.

        Raises:
            EnvironmentContractError: it returned something to be awaited without that.
            Exception: what the method raised.
        """
        name = f"{type(env).__name__}.{method}"
        function = getattr(env, method)
        started = time.perf_counter()
        is_tool = method not in ("reset", "step", "get_reward")
        result = _elsewhere(lambda: function(*args, **kwargs), is_tool)
        if inspect.iscoroutinefunction(function):
            result = self._runner.run(result)
        self._seconds.setdefault(name, []).append(time.perf_counter() - started)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise violation(
                f"{name} returned {short(result)}, which has to be awaited",
                "a plain method that returns values, or one declared `async def`",
                "a coroutine function hidden behind a plain one",
                f"declare {method} with `async def`",
            )
        return result

    def call(self, env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `run`, for methods that must not raise.

        Raises:
            EnvironmentContractError: it raised, or returned something to be awaited.
        """
        try:
            return self.run(env, method, *args, **kwargs)
        except EnvironmentContractError:
            raise
        except Exception as error:
            if method == "reset" and isinstance(error, KeyError) and error.args[:1]:
                column = error.args[0]
                # What the row's own texts hold was looked up in something else than the row.
                values = " ".join(map(str, kwargs.values()))
                if isinstance(column, str) and column not in kwargs and column not in values:
                    what = f"{type(env).__name__}.reset raised KeyError: {column!r}"
                    raise lacks(what, [column], kwargs) from error
            reasons = _NOT_TO_RAISE.get(method, _NOT_TO_RAISE["other"])
            if "same thread" in str(error) or "main thread" in str(error):
                reasons = _OF_ONE_THREAD
            shown = [*map(short, args), *(f"{k}={short(v)}" for k, v in kwargs.items())]
            raise violation(
                f"{type(env).__name__}.{method}({', '.join(shown)}) raised "
                f"{type(error).__name__}: {error}",
                *reasons,
            ) from error

    def warn_if_slow(self) -> None:
        """Name the methods whose slowest call took long."""
        for name, (first, *later) in self._seconds.items():
            # The first call of all may load what the whole process shares from then on.
            seconds = max(later, default=first)
            if seconds > SLOW_SECONDS:
                self.warn(
                    f"{name} took {seconds:.1f} s at its slowest. Every turn of every episode waits "
                    f"for it. Load models and data once, in the constructor or shared by instances."
                )


def lacks(what: str, columns: list[str], row: dict[str, Any]) -> EnvironmentContractError:
    """The error for columns that `reset` needs and a row has not."""
    wanted = " and ".join(map(repr, columns))
    return violation(
        f"{what}, and the row with the columns {sorted(row)} has no {wanted}",
        "parameters that are columns of every row, or that have a default",
        "rows of another task, a column of another name, or a check without rows",
        f"add {wanted} to the rows (env check: --rows FILE, check_env: rows=[...]), rename the "
        f"column, or give the parameter a default",
    )


def check_reset_signature(env: Any, row: dict[str, Any]) -> str | None:
    """A smell, if any; raises if `reset` cannot take the row."""
    name = f"{type(env).__name__}.reset"
    signature = inspect.signature(env.reset)
    try:
        signature.bind(**row)
    except TypeError as error:
        parameters = signature.parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        lacking = [p.name for p in named if p.default is p.empty and p.name not in row]
        if lacking:
            what = f"{name}{signature} needs {' and '.join(map(repr, lacking))}"
            raise lacks(what, lacking, row) from None
        raise violation(
            f"{name}{signature} cannot take the row's columns {sorted(row)} ({error})",
            "reset(**row): every column comes as a keyword, `prompt` included",
            "a missing **kwargs",
            f"write def reset(self, **row), or add **row to {signature}",
        ) from None
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return (
            f"{name}{signature} has no **kwargs: a data set with one more column would break it. "
            f"Add **row."
        )
    return None


def pickling_smell(factory: Any) -> str | None:
    """What stands between the factory and a process of its own."""
    try:
        pickle.dumps(factory)
    except Exception as error:
        return (
            f"The factory cannot be pickled ({type(error).__name__}: {error}), so that "
            f'env_isolation="process" cannot send it by name. Use a class, a function of a module, '
            f"or functools.partial of one."
        )
    return None


def global_generators() -> Generators:
    """The generators of the whole process; numpy's and torch's only where they are loaded."""
    found: Generators = {"random": (random.getstate, random.getstate, random.setstate, random.seed)}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        legacy = numpy.random
        found["numpy.random"] = (
            lambda: pickle.dumps(legacy.get_state()),
            legacy.get_state,
            legacy.set_state,
            legacy.seed,
        )
    if torch is not None:
        found["torch"] = (
            lambda: torch.get_rng_state().tolist(),
            torch.get_rng_state,
            torch.set_rng_state,
            # `torch.manual_seed` would seed the devices too.
            torch.default_generator.manual_seed,
        )
    return found
