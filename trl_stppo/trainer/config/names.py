"""Names of settings: which are known, which are two names of one, which are old, which mean nothing here."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, TypeVar, cast

from ...wording import GONE, RENAMED, proposal

logger = logging.getLogger(__name__)
Config = TypeVar("Config")
Value = TypeVar("Value")

# PPO's name -> GRPOConfig's name for the same thing.
ALIASES = {
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "response_length": "max_completion_length",
}
# Settings of TRL's PPO that scripts may set and read, and that change nothing here -> why.
IGNORED = {
    "dataset_num_proc": "the rows are tokenised as they are played",
    "model_adapter_name": "the adapter that is trained is always 'default'",
    "ref_adapter_name": "the frozen copy of it is always 'ref'",
    "num_sample_generations": "log_completions=True prints episodes",
}


# ------------------------------------------------------------------ names of 0.1.0, until 0.3


def _stop_when(old: Mapping[str, Any], given: Mapping[str, Any]) -> list[str] | None:
    patience = int(old.get("collapse_patience") or 5)
    ratio = float(old.get("max_clip_bias_ratio") or math.inf)
    limits = {
        "turns/valid_action_rate": old.get("min_valid_action_rate"),
        "reward_std": old.get("min_reward_std"),
        # C > r g is g / (g + C) < 1 / (1 + r)
        "clip_bias/share": None if ratio == math.inf else f"{1 / (1 + ratio):.12g}",
    }
    said = {metric: limit for metric, limit in limits.items() if limit is not None}
    return [f"{metric} < {limit} for {patience}" for metric, limit in said.items()] or None


def _eval_generation_kwargs(
    old: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any] | None:
    said = {name.removeprefix("eval_"): v for name, v in old.items() if v is not None}
    return said or None


def _enable_jit_checkpoint(old: Mapping[str, Any], given: Mapping[str, Any]) -> bool | None:
    value: bool | None = old["save_on_signal"]
    return value


def _clip_bias_estimator(old: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    # Where the bias is corrected it is measured anyway.
    corrects = given.get("clip_bias_normalization") not in (None, "none")
    wanted = old["log_clip_bias"] and not corrects and not given.get("stabilizers")
    estimator: str | None = given.get("clip_bias_estimator")
    return estimator or ("auto" if wanted else None)


def _stabilizers(old: Mapping[str, Any], given: Mapping[str, Any]) -> list[str] | None:
    mode, target = old.get("clip_bias_normalization"), old.get("clip_bias_target")
    if mode == "none":
        return []
    if mode in (None, "share") and target not in (None, "update"):
        return ["share on the gradient"]
    return None if mode is None else [str(mode)]


def _on_env_error(old: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    mode, price = given.get("on_env_error"), old["env_error_penalty"]
    penalises = str(mode).startswith("penalise") and price is not None
    return f"penalise {price}" if penalises else mode


# Setting of today -> its names in 0.1.0, and what their values make of it.
OLD: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Mapping[str, Any]], Any]]] = {
    "stop_when": (
        ("min_valid_action_rate", "min_reward_std", "max_clip_bias_ratio", "collapse_patience"),
        _stop_when,
    ),
    "eval_generation_kwargs": (
        ("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_completion_length"),
        _eval_generation_kwargs,
    ),
    "enable_jit_checkpoint": (("save_on_signal",), _enable_jit_checkpoint),
    "clip_bias_estimator": (("log_clip_bias",), _clip_bias_estimator),
    "on_env_error": (("env_error_penalty",), _on_env_error),
    "stabilizers": (("clip_bias_normalization", "clip_bias_target"), _stabilizers),
}
# Old name -> today's.
OLD_NAMES = {name: new for new, (names, _) in OLD.items() for name in names}


def renamed(given: Mapping[str, Any], *, stacklevel: int | None = None) -> dict[str, Any]:
    """Settings under today's names.

    Args:
        given: settings by name, old ones among them.
        stacklevel: of the warning, for old names that somebody has typed; None for those of a file that
            an old version has written, which holds all of them and is not warned of.

    Raises:
        ValueError: a setting is typed under both of its names, with different values.
    """
    result = {name: value for name, value in given.items() if name not in OLD_NAMES}
    for new in dict.fromkeys(OLD_NAMES[name] for name in given if name in OLD_NAMES):
        names, convert = OLD[new]
        old = {name: given[name] for name in names if name in given}
        value, typed = convert(old, given), result.get(new)
        if stacklevel is not None:
            said = ", ".join(f"`{name}={v}`" for name, v in old.items())
            # "penalise" and a price are one setting, not two that contradict.
            if None not in (typed, value) and not str(value).startswith(str(typed)):
                raise ValueError(
                    f"{said} contradicts `{new}={typed}`, its name since 0.2. Set only {new}."
                )
            warnings.warn(
                f"{said}: since 0.2 that is `{new}`, here {new}={value!r}. Old names go in 0.3.",
                DeprecationWarning,
                stacklevel=stacklevel + 1,
            )
        if value is not None:
            result[new] = value
    return result


def without_ignored(given: Mapping[str, Any], *, warns: bool = True) -> dict[str, Any]:
    """Settings without those that change nothing, and without those that have gone and were off.

    Says so where one was meant to, unless it `warns` of none.
    """
    for name in IGNORED.keys() & given.keys():
        if warns and given[name] not in (None, 0):
            logger.warning("`%s=%s` is ignored: %s.", name, given[name], IGNORED[name])
    return {name: v for name, v in given.items() if name not in IGNORED and not _was_off(name, v)}


def _was_off(name: str, value: Any) -> bool:
    return name in GONE and value is False


# ------------------------------------------------------------------------- constructors


class Preset(str):
    """A default that is told from the same word in somebody's hand, after argparse too, which calls `str`."""

    def __str__(self) -> str:
        return self


def option(default: Value, meaning: str) -> Value:
    """A field with what `--help_all` and the API pages say of it; the default as type checkers see it."""
    spec: Any = field(default=default, metadata={"help": meaning})
    return cast(Value, spec)


class KnownNames:
    """Refuses unknown arguments of a dataclass by what they may have been meant to be."""

    def __new__(cls, *args: Any, **given: Any) -> KnownNames:
        """Look at the names; the rest is `__init__`'s, which a subclass may have written itself."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        takes_old = hasattr(cls.__init__, "__wrapped__")
        for name in given:
            old = name in IGNORED or OLD_NAMES.get(name) in known or _was_off(name, given[name])
            if name in known or takes_any or (takes_old and old):
                continue
            advice = proposal(name, known) or "`trl-stppo train --help_all` lists all there are."
            if name in OLD_NAMES:
                advice = f"Since 0.2 it is `{OLD_NAMES[name]}`; docs/migration.md says how."
            elif name in RENAMED and RENAMED[name] not in known:
                advice = (
                    "The trainer, ModelConfig or LoraConfig takes it; on the command line it is "
                    f"`--{RENAMED[name]}`."
                )
            raise TypeError(f"{cls.__name__} has no argument `{name}`. {advice}")
        return super().__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a `training_args.bin`, also one of 0.1.0."""
        self.__dict__.update(renamed(state))


def takes_old_names(cls: type[Config]) -> type[Config]:
    """Decorator of a dataclass: its constructor also takes names of OLD and IGNORED."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        kept = without_ignored(given)
        for name in IGNORED.keys() & given.keys():
            setattr(self, name, given[name])  # scripts read them back
        generated(self, *args, **renamed(kept, stacklevel=2))

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
