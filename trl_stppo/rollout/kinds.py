"""Tells text environments (`reset`/`step`) from TRL's tool-method environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Factory = Callable[[], Any]
Factories = dict[str | None, Factory]


def is_text_environment(env: Any) -> bool:
    """Whether `env.step(action)` is the environment's step rather than one tool among others.

    A TRL tool must be annotated `-> str`; a step returns a tuple. That annotation is what tells a
    tool that happens to be called `step` apart.
    """
    step = getattr(env, "step", None)
    if not callable(step):
        return False
    annotation = inspect.signature(step).return_annotation
    return annotation not in (str, "str")


def split_environments(
    environment_factory: Factory | dict[str, Factory] | None,
) -> tuple[Factories | None, Factory | dict[str, Factory] | None]:
    """Separate what our loop plays from what TRL's loop plays.

    Args:
        environment_factory: as in GRPOTrainer, a factory or a dict of them.

    Returns:
        `(text, tools)`, one of which is None: factories of text environments by name, or the
        argument for TRL. Each factory's first call returns the instance that was probed here.

    Raises:
        ValueError: an environment without `reset`, or a dict that mixes the two kinds.
    """
    if environment_factory is None:
        return None, None
    named = isinstance(environment_factory, dict)
    factories: Factories
    if isinstance(environment_factory, dict):
        factories = {name: make for name, make in environment_factory.items()}
    else:
        factories = {None: environment_factory}
    kinds: dict[str | None, bool] = {}
    reusing: Factories = {}
    for name, factory in factories.items():
        instance = factory()
        if not callable(getattr(instance, "reset", None)):
            raise ValueError(
                f"`environment_factory` made a {type(instance).__name__} without a `reset` method. An "
                f"environment needs `reset(**row)`, and either `step(action)` (a text environment) or "
                f"public methods with type hints and docstrings (tools)."
            )
        kinds[name] = is_text_environment(instance)
        reusing[name] = _returning_first(instance, factory)
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"`environment_factory` mixes text environments "
            f"({[n for n, text in kinds.items() if text]}) and tool environments "
            f"({[n for n, text in kinds.items() if not text]}). Train on one kind at a time."
        )
    if next(iter(kinds.values())):
        return reusing, None
    if named:
        return None, {str(name): factory for name, factory in reusing.items()}
    return None, reusing[None]


def _returning_first(instance: Any, factory: Factory) -> Factory:
    """A factory whose first call hands out an instance that exists already."""
    waiting = [instance]
    return lambda: waiting.pop() if waiting else factory()
