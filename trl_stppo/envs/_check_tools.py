"""The checks of tool environments: what TRL and transformers need to offer methods to a model."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._check_session import Session, global_generators
from ._check_values import check_number, check_opening, short, violation
from .base import tool_names

_ARGS = re.compile(r"\n\s*Args:\s*\n(.*?)(?:\n\s*(?:Returns|Raises):|\Z)", re.DOTALL)


def check_tools(
    session: Session,
    env: Any,
    rows: Sequence[dict[str, Any]],
    calls: Sequence[tuple[str, dict[str, Any]]] | None,
    *,
    several: bool,
) -> None:
    """Check an environment whose public methods are tools.

    Args:
        session: makes and calls the instances, keeps the smells.
        env: a new instance.
        rows: at least one.
        calls: `(tool, arguments)` to be played on each row.
        several: whether a second instance can be made.
    """
    name, names = type(env).__name__, tool_names(env)
    if not names:
        raise violation(
            f"{name} has neither `step` nor a public method",
            "step(action) for a text environment, or public methods of the class as tools",
            "tools that start with an underscore, or that are set on the instance",
            "define at least one public method with type hints and a docstring",
        )
    for tool in names:
        check_schema(session.warn, f"{name}.{tool}", getattr(env, tool))
    if "close" in names:
        session.warn(
            f"{name}.close is public, so that TRL offers it to the model. Rename it _close."
        )
    for row in rows:
        _play(session, env, row, calls or (), names)
    repeats = _check_fresh_start(session, env, rows[0], calls or (), names)
    if several:
        _check_sharing(session, env, rows, calls or (), repeats=repeats)


def check_schema(warn: Callable[[str], Any], name: str, tool: Callable[..., Any]) -> None:
    """Raise unless the method can be described to the model; `warn` gets what is only untidy."""
    helper = "or let the name of a helper start with an underscore"
    doc = inspect.getdoc(tool)
    if not doc:
        raise violation(
            f"{name} has no docstring",
            "a description, and an Args section with every parameter",
            "a helper that was not meant for the model, or a forgotten docstring",
            f"describe it {helper}",
        )
    section = _ARGS.search(f"\n{doc}\n")
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise violation(
                f"{name} takes {parameter}",
                "parameters that have a name each",
                "a wrapper around another function",
                f"write the parameters out, {helper}",
            )
        if parameter.annotation is parameter.empty:
            raise violation(
                f"{name} has no type hint for `{parameter.name}`",
                "a type hint for every parameter",
                "a forgotten hint",
                f"write for example {parameter.name}: str, {helper}",
            )
        # "name (str): .." is not what transformers reads.
        described = rf"^\s*{re.escape(parameter.name)}:\s*\S"
        if section is None or not re.search(described, section[1], re.MULTILINE):
            raise violation(
                f"{name} does not describe `{parameter.name}` in its docstring",
                "an Args section with every parameter",
                "a forgotten Args section, another docstring style than Google's, or a type in "
                "parentheses after the name",
                f"add a line `{parameter.name}: what it means` under `Args:`, {helper}",
            )
    if inspect.signature(tool).return_annotation is inspect.Signature.empty:
        warn(f"{name} has no return annotation; write -> str.")
    _check_json_schema(name, tool)


def _check_json_schema(name: str, tool: Callable[..., Any]) -> None:
    """The last word is transformers', where it is installed."""
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        return
    try:
        get_json_schema(tool)
    except Exception as error:
        raise violation(
            f"{name} cannot be described to the model ({type(error).__name__}: {error})",
            "str, int, float, bool, list, dict, Literal, Optional and unions of these",
            "a class of your own as a type hint, or a hint that is imported for type checkers only",
            "use plain types and convert inside",
        ) from error


def _play(
    session: Session,
    env: Any,
    row: dict[str, Any],
    calls: Sequence[tuple[str, dict[str, Any]]],
    names: Sequence[str],
) -> str:
    name = type(env).__name__
    opening = check_opening(f"{name}.reset", session.call(env, "reset", **row), tools=True)
    for tool, arguments in calls:
        if tool not in names:
            raise ValueError(f"actions name {tool!r}; the tools of {name} are {', '.join(names)}.")
        try:
            result = session.run(env, tool, **arguments)
        except EnvironmentContractError:
            raise
        except Exception as error:
            session.warn(
                f"{name}.{tool} raised {type(error).__name__}: {error}. The model will read that as "
                f"the result; it counts as a failed call."
            )
            continue
        if not isinstance(result, str | list):
            session.warn(
                f"{name}.{tool} returned {short(result)}; the model will read it as str(...). Return "
                f"a text that says what it is."
            )
    if callable(getattr(env, "get_reward", None)):
        reward = session.call(env, "get_reward")
        if reward is not None:
            check_number(f"{name}.get_reward returned", reward)
    for reward in _turn_rewards(env) or ():
        check_number(f"{name}.turn_rewards holds", reward)
    return opening


def _turn_rewards(env: Any) -> list[Any] | None:
    rewards = getattr(env, "turn_rewards", None)
    if not isinstance(rewards, list | None):
        raise violation(
            f"{type(env).__name__}.turn_rewards is {short(rewards)}",
            "a list of floats",
            "a sum, a tuple or an array",
            "set self.turn_rewards = [] in reset and append to it in the tools",
        )
    return rewards


def _check_fresh_start(
    session: Session,
    env: Any,
    row: dict[str, Any],
    calls: Sequence[tuple[str, dict[str, Any]]],
    names: Sequence[str],
) -> bool:
    """Reset again and again; whether that opens alike."""
    name, generators = type(env).__name__, global_generators()
    openings, after = [], []
    for seed in (1, 2):
        for _, _, _, set_seed in generators.values():
            set_seed(seed)
        openings.append(_play(session, env, row, (), names))
        after.append({label: state() for label, (state, *_) in generators.items()})
        _play(session, env, row, calls, names)
    reseeded = [label for label in generators if after[0][label] == after[1][label]]
    if reseeded:
        session.warn(
            f"{name}.reset reseeds {' and '.join(reseeded)} of the whole process. Use a generator of "
            f"your own, for example random.Random(seed)."
        )
    if openings[0] != openings[1]:
        session.warn(
            f"{name}.reset opens the same row differently the second time. If a row stands for one "
            f"task, clear the old episode's state, or seed from row['seed']."
        )
    rewards = _turn_rewards(env)
    if rewards is not None:
        rewards.append(0.0)  # as a tool would
        session.call(env, "reset", **row)
        if _turn_rewards(env):
            raise violation(
                f"{name}.reset left {len(_turn_rewards(env) or ())} entries in turn_rewards",
                "an empty list after reset",
                "turn_rewards is set in __init__ only",
                "set self.turn_rewards = [] in reset",
            )
    return openings[0] == openings[1]


def _check_sharing(
    session: Session,
    env: Any,
    rows: Sequence[dict[str, Any]],
    calls: Sequence[tuple[str, dict[str, Any]]],
    *,
    repeats: bool,
) -> None:
    """Two instances at once: each must behave as if it were alone."""
    other, name = session.make(), type(env).__name__
    opening = session.call(env, "reset", **rows[0])
    _play(session, other, rows[-1], calls, tool_names(other))
    rewards = _turn_rewards(env)
    if rewards is not None and (rewards or rewards is _turn_rewards(other)):
        raise violation(
            f"Two instances of {name} share one list turn_rewards",
            "a list of its own for each instance",
            "turn_rewards is a class attribute or a default argument",
            "set self.turn_rewards = [] in __init__ and reset",
        )
    if repeats and session.call(env, "reset", **rows[0]) != opening:
        raise violation(
            f"Two instances of {name} change each other: one opens differently after the other's "
            f"tools were called",
            "instances that share nothing that changes",
            "a list or dict as a class attribute or default argument, or one client or file for all",
            "create the state in __init__ or reset",
        )
