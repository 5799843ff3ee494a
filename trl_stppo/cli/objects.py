"""Load the objects that flags name: `module:name`, TRL's rewards, environment factories, rows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..envs.base import Row
from ..rollout.isolation import Isolated, isolated
from .usage import UsageError, parsed_json

# Name of a reward function of `trl grpo` -> arguments of the call, if the name is a factory.
TRL_REWARDS: dict[str, dict[str, int]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}


def load_object(path: str) -> Any:
    """Import the object `module:name` or `module.name`. Modules in the current folder are found too."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise UsageError(f"`{path}`: must be module:name.")
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"`{path}`: {error.name} is neither in {here} nor installed.") from error
    with contextlib.suppress(AttributeError):
        return getattr(loaded, name)
    raise UsageError(f"`{path}`: the module {module} has no attribute {name!r}.")


def load_reward(path: str) -> Any:
    """Load a reward function by its name in TRL, or by an import path as in `load_object`."""
    if path in TRL_REWARDS:
        from trl import rewards

        function, arguments = getattr(rewards, path), TRL_REWARDS[path]
        return function(**arguments) if arguments else function
    return load_object(path)


def offered_by(path: str | None, name: str) -> Any:
    """Return the result of an environment's class method `name`, or None if there is no such method."""
    if path in (None, "none"):
        return None
    made = load_object(str(path))
    method = getattr(made.factory if isinstance(made, Isolated) else made, name, None)
    return method() if inspect.ismethod(method) else None


def factory_of(
    path: str | None,
    arguments: str | None,
    count_tokens: Callable[[str], int] | None = None,
    *,
    flag: str = "environment_kwargs",
) -> Callable[[], object] | None:
    """Import the factory `path` and bind the JSON `arguments`; return None if `path` is None or "none".

    `count_tokens` is bound if the factory accepts it and limits observations in tokens.
    """
    if path in (None, "none"):
        return None
    made = load_object(str(path))
    factory = made.factory if isinstance(made, Isolated) else made
    bound = {} if arguments is None else parsed_json(arguments, flag)
    name = "max_observation_tokens"
    # Some built-in functions have no signature.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(factory).parameters
        cap = bound.get(name, getattr(parameters.get(name), "default", None))
        if count_tokens is not None and cap is not None and "count_tokens" in parameters:
            bound.setdefault("count_tokens", count_tokens)
    factory = functools.partial(factory, **bound) if bound else factory
    return isolated(factory) if isinstance(made, Isolated) else factory


def rows_for(environment: str, file: str | None, row: str | None) -> list[Row] | None:
    """Return the rows to play, from a file, a JSON row, or the class's data set; None without rows."""
    if file is not None:
        if not Path(file).is_file():
            raise UsageError(f"`--rows {file}`: must be a file of JSON lines, .jsonl.")
        lines = Path(file).read_text().splitlines()
        return [parsed_json(line, "rows") for line in lines if line.strip()]
    if row is not None:
        return [parsed_json(row, "row")]
    offered = offered_by(environment, "datasets") or {}
    return next((list(rows("train")) for rows in offered.values()), None)
