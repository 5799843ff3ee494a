"""What an environment may return, checked value by value."""

import math
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

from trl_stppo.errors import EnvironmentContractError

FIVE = "(observation, reward, terminated, truncated, info)"
FOUR = "(observation, reward, done, info)"


class Step(NamedTuple):
    """A checked result of `step`, in its long form."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def violation(what: str, allowed: str, cause: str, fix: str) -> EnvironmentContractError:
    """The error for a broken contract: what came, what may come, why it happens, what to do."""
    return EnvironmentContractError(
        f"{what.rstrip('.')}; allowed: {allowed}. Likely cause: {cause}. Fix: {fix}."
    )


def short(value: Any) -> str:
    """A value as it can stand in a message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_opening(name: str, result: Any, *, tools: bool) -> str:
    """The text that `reset` returned."""
    kinds: Any = str | None
    allowed = "(observation, info), an observation (str), or None"
    if tools:
        kinds, allowed = str | list | None, "a str, a list of content blocks, or None"
    elif isinstance(result, tuple) and len(result) == 2:
        if not isinstance(result[1], dict):
            raise violation(
                f"{name} returned the info {short(result[1])}",
                "a dict",
                "the two values are in the wrong order, or info was left out",
                "return observation, {} (or only the observation)",
            )
        result = result[0]
    if not isinstance(result, kinds):
        raise violation(
            f"{name} returned {short(result)}",
            allowed,
            "text environments return a pair, tool environments do not"
            if tools
            else "the observation is still an array, a dict or a list of messages",
            "return the observation alone" if tools else "turn the observation into text first",
        )
    return result if isinstance(result, str) else str(result or "")


def check_step(name: str, result: Any, *, strict: bool = True) -> Step:
    """The result of `step`, whatever its form.

    Args:
        name: of the method.
        result: what it returned.
        strict: refuse flags that are merely true or false; a training takes them as they are.
    """
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise violation(
            f"{name} returned {got}: {short(result)}",
            f"{FIVE} or {FOUR}, as a tuple",
            "a missing value, a list instead of a tuple, or a path without a return",
            f"return {FIVE} on every path",
        )
    observation, reward, *flags, info = result
    if not isinstance(observation, str):
        raise violation(
            f"{name} returned the observation {short(observation)}",
            'a str, "" for nothing, at the end of an episode too',
            "no text for this case, or an array that was not turned into text",
            "return a str on every path",
        )
    if not isinstance(info, dict):
        raise violation(
            f"{name} returned the info {short(info)}",
            "a dict",
            "the values are in the wrong order, or info was left out",
            "return a dict, {} for nothing, as the last value",
        )
    number = check_number(f"{name} returned the reward", reward)
    if strict:
        _check_flags(name, flags, info)
    terminated, truncated = bool(flags[0]), bool(flags[-1])
    if len(flags) == 1:  # the older form marks a time limit in `info`
        truncated = terminated and bool(info.get("TimeLimit.truncated"))
        terminated = terminated and not truncated
    return Step(observation, number, terminated, truncated, info)


def _check_flags(name: str, flags: list[Any], info: dict[str, Any]) -> None:
    for flag, value in zip(("terminated", "truncated"), flags, strict=False):
        check_flag(f"{name} returned {flag if len(flags) == 2 else 'done'}", value)
    for key in ("valid_action", "success"):
        if info.get(key) is not None:
            check_flag(f"{name} returned info[{key!r}]", info[key])


def check_number(name: str, value: Any) -> float:
    """A reward as a float."""
    # Arrays and tensors of one element are numbers to `float`; so are texts, which are not rewards.
    number = math.nan
    is_scalar = hasattr(value, "item") and not isinstance(value, str | bytes | complex)
    if isinstance(value, Real | Decimal) or is_scalar:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
    if not math.isfinite(number):
        raise violation(
            f"{name} {short(value)}",
            "a finite number",
            "a path without a reward, a number that was read from text and not converted, a division "
            "by zero, or message and reward swapped",
            "return a float, 0.0 for nothing",
        )
    return number


def check_flag(name: str, value: Any) -> None:
    """A bool, numpy's included."""
    is_array_bool = str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if isinstance(value, bool) or (is_array_bool and getattr(value, "ndim", 0) == 0):
        return
    raise violation(
        f"{name} = {short(value)}",
        "True or False (numpy's too)",
        "the values are in the wrong order, or the result of a search (None, a match, a count) was "
        "returned as it is",
        "wrap it in bool(...)",
    )
