"""Objects that flags name as `module:name`, reward functions of TRL, and factories of environments."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ..redaction import redacted
from ..wording import did_you_mean
from .sources import source
from .usage import UsageError


def load_object(path: str) -> Any:
    """The object behind `module:name` or `module.name`.

    Modules in the current folder are found, as by `python -m`.

    Raises:
        UsageError: there is none.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise UsageError(f"`{path}` does not name an object; write it as module:name.")
    # Python shows it to whoever imports only; here a flag or a file has an old name.
    warnings.filterwarnings("default", category=DeprecationWarning, message=r"trl_stppo\.")
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise UsageError(
            f"`{path}`: there is no module {error.name}, neither in {here} nor installed. Check the name, "
            f"or start where the module is."
        ) from error
    with contextlib.suppress(AttributeError):
        return getattr(loaded, name)
    public = [other for other in dir(loaded) if not other.startswith("_")]
    proposal = did_you_mean(name, public) or "Check the name."
    raise UsageError(f"`{path}`: the module {module} has no attribute {name!r}. {proposal}")


# ------------------------------------------------------------------------ reward functions


def trl_rewards() -> dict[str, ast.expr]:
    """Names by which `trl grpo` knows reward functions, and what each stands for in its script.

    The table is a local of that script, so it is read from there.
    """
    table = source("trl.scripts.grpo").statements["reward_funcs_registry"].value
    return {ast.literal_eval(k): v for k, v in zip(table.keys, table.values, strict=True)}


def load_reward(path: str, key: str) -> Any:
    """The reward function behind one of TRL's names, or a path as `load_object` takes it.

    Raises:
        UsageError: there is none.
    """
    known = trl_rewards()
    if path in known:
        from trl import rewards

        names = {node.id for node in ast.walk(known[path]) if isinstance(node, ast.Name)}
        code = compile(ast.Expression(known[path]), path, "eval")
        return eval(code, {name: getattr(rewards, name) for name in names})
    try:
        return load_object(path)
    except UsageError as error:
        parts = [f"`{key}`: {error}", did_you_mean(path, known)]
        parts += [f"Allowed are module:name, module.name, and TRL's {', '.join(known)}."]
        raise UsageError(" ".join(filter(None, parts))) from error


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
    bound = {} if arguments is None else parsed_object(arguments, flag, '{"top_k": 3}')
    defaults = parameters_of(factory)
    cap = bound.get("max_observation_tokens", defaults.get("max_observation_tokens"))
    if count_tokens is not None and cap is not None and "count_tokens" in defaults:
        bound.setdefault("count_tokens", count_tokens)
    return functools.partial(factory, **bound) if bound else factory


def parsed_object(text: str, flag: str, example: str) -> dict[str, Any]:
    """The JSON object that a flag gives; `example` is one that it could be."""
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        read = error
    if not isinstance(read, dict):
        raise UsageError(
            f"`{flag}={redacted(text)}` is no JSON object ({read}); write it as in '{example}', with "
            f"double quotes inside."
        )
    return read


def parameters_of(factory: Any) -> dict[str, Any]:
    """Names and defaults of what can be given by name; none where nobody can tell."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: None if p.default is p.empty else p.default for p in named}
