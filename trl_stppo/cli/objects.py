"""Objects that flags name as `module:name`, rewards of TRL, factories of environments, rows in a file."""

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

from .usage import UsageError, parsed_json

# Names by which `trl grpo` knows reward functions -> arguments of those that it makes.
TRL_REWARDS: dict[str, dict[str, int]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}


def load_object(path: str) -> Any:
    """The object behind `module:name` or `module.name`.

    Modules in the current folder are found, as by `python -m`.

    Raises:
        UsageError: there is none.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise UsageError(f"`{path}` does not name an object; write it as module:name.")
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise UsageError(
            f"`{path}`: there is no module {error.name}, neither in {here} nor installed."
        ) from error
    with contextlib.suppress(AttributeError):
        return getattr(loaded, name)
    raise UsageError(f"`{path}`: the module {module} has no attribute {name!r}.")


def load_reward(path: str, key: str) -> Any:
    """The reward function behind one of TRL's names, or a path as `load_object` takes it.

    Raises:
        UsageError: there is none.
    """
    if path in TRL_REWARDS:
        from trl import rewards

        function, arguments = getattr(rewards, path), TRL_REWARDS[path]
        return function(**arguments) if arguments else function
    try:
        return load_object(path)
    except UsageError as error:
        raise UsageError(f"`{key}`: {error} TRL's are {', '.join(TRL_REWARDS)}.") from error


# ---------------------------------------------------------------------------- environments


def offered_by(path: str | None, name: str) -> Any:
    """What an environment's class says of itself by an optional class method.

    Args:
        path: `module:Class`; None or "none" for none.
        name: of the method: `datasets` or `figures` (docs/environments.md).

    Returns:
        what the method does; None where there is none.
    """
    if path in (None, "none"):
        return None
    method = getattr(load_object(str(path)), name, None)
    return method() if inspect.ismethod(method) else None


def named_factory(path: str, arguments: str | None) -> Any:
    """`factory_of` for a command that needs an environment.

    Raises:
        UsageError: none is named.
    """
    factory = factory_of(path, arguments, flag="arguments")
    if factory is None:
        raise UsageError("`none` is no environment. Name one as module:name.")
    return factory


def factory_of(
    path: str | None,
    arguments: str | None,
    count_tokens: Callable[[str], int] | None = None,
    *,
    flag: str = "environment_kwargs",
) -> Callable[[], Any] | None:
    """The factory `module:factory`, with arguments bound that are written as a JSON object.

    Args:
        path: of the factory; None or "none" for none.
        arguments: the JSON object.
        count_tokens: bound as well where the factory takes it and caps observations in tokens.
        flag: that the JSON object comes from.
    """
    if path in (None, "none"):
        return None
    factory = load_object(str(path))
    bound = {} if arguments is None else parsed_json(arguments, flag)
    defaults = _parameters_of(factory)
    cap = bound.get("max_observation_tokens", defaults.get("max_observation_tokens"))
    if count_tokens is not None and cap is not None and "count_tokens" in defaults:
        bound.setdefault("count_tokens", count_tokens)
    return functools.partial(factory, **bound) if bound else factory


def _parameters_of(factory: Any) -> dict[str, Any]:
    """Names and defaults of what can be given by name; none where nobody can tell."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: None if p.default is p.empty else p.default for p in named}


def rows_for(environment: str, file: str | None, row: str | None) -> list[dict[str, Any]] | None:
    """Rows to play: of a file of JSON lines, one as JSON, those that the class offers, or None."""
    if file is not None and (not file.endswith(".jsonl") or not Path(file).is_file()):
        raise UsageError(f"`--rows {file}`: must be a file of JSON lines, .jsonl.")
    if file is not None:
        lines = Path(file).read_text().splitlines()
        return [parsed_json(line, "rows") for line in lines if line.strip()]
    if row is not None:
        return [parsed_json(row, "row")]
    own = offered_by(environment, "datasets") or {}
    return next((list(rows("train")) for rows in own.values()), None)
