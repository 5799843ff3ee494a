"""Sorts environment factories into text and tool environments, and keeps their instances."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..envs.base import is_text_environment, tool_names
from .isolation import Isolated, IsolatedEnvironment

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
Factories = dict[str | None, Factory]


def split_environments(
    environment_factory: Factory | dict[str, Factory] | None,
) -> tuple[Factories, Factories, dict[str | None, Any]]:
    """Call each factory once; return text environments, tool environments, and the instances made.

    The keys are names of factories; None is the single unnamed factory.
    """
    text: Factories = {}
    tools: Factories = {}
    probes: dict[str | None, Any] = {}
    factories: Any = {None: environment_factory}
    if isinstance(environment_factory, dict | None):
        factories = environment_factory or {}
    for name, factory in factories.items():
        if not callable(factory):
            kind = factory if isinstance(factory, str) else type(factory).__name__
            raise ValueError(f"`environment_factory` is or holds {kind!r}; allowed: callables.")
        probe = probes[name] = factory()
        if not callable(getattr(probe, "reset", None)):
            raise ValueError(f"`environment_factory` made a {type(probe).__name__} without a `reset` method.")
        (text if is_text_environment(probe) else tools)[name] = factory
    return text, tools, probes


class EnvironmentPool:
    """Pool of environment instances, one per episode of a rollout. Later rollouts reuse the instances.

    The n-th episode of a factory always gets the n-th instance, so that an environment's own randomness
    does not depend on timing. A broken instance is discarded; the next `take` makes another.
    `probes` are used first. Each instance of an `Isolated` factory gets a process of its own, so its probe,
    which lives in this process, does not play.
    """

    def __init__(self, factories: Factories, probes: dict[str | None, Any] | None = None) -> None:
        self._factories = factories
        self._lock = threading.Lock()
        self._instances: dict[tuple[str | None, int], Any] = {
            (name, 0): probe
            for name, probe in (probes or {}).items()
            if not isinstance(factories.get(name), Isolated)
        }
        # `discard` raises the count, so that an instance whose construction began earlier is not kept.
        self._discards: Counter[tuple[str | None, int]] = Counter()

    def take(self, name: str | None, index: int) -> Any:
        """Return the factory's instance number `index`, and make it if it is missing. Workers call this."""
        key = (name, index)
        with self._lock:
            found, discards = self._instances.get(key), self._discards[key]
        if found is not None:
            return found
        factory: Any = self._factories[name]
        isolated = isinstance(factory, Isolated)
        env = IsolatedEnvironment(factory.factory) if isolated else factory()
        with self._lock:
            late = self._discards[key] != discards
            if not late:
                self._instances[key] = env
        if late and isolated:
            env.kill()
        return env

    def discard(self, name: str | None, index: int) -> Any | None:
        """Remove a broken instance and return it. An isolated instance is killed, and None is returned."""
        with self._lock:
            self._discards[name, index] += 1
            env = self._instances.pop((name, index), None)
        if isinstance(env, IsolatedEnvironment):
            env.kill()
            return None
        return env

    def close(self, run_async: Callable[[Any], Any]) -> None:
        """Remove all instances, and call `close()` of each instance that has this method."""
        with self._lock:
            instances, self._instances = list(self._instances.values()), {}
        for env in instances:
            close_environment(env, run_async)


def close_environment(env: Any, run_async: Callable[[Any], Any]) -> None:
    """Call an environment's `close()` if it has one, and log its exception."""
    close = getattr(env, "close", None)
    isolated = isinstance(env, IsolatedEnvironment)
    # Do not call a tool: the public methods of a tool environment are its tools.
    is_tool = not is_text_environment(env) and "close" in tool_names(env)
    if close is None or (is_tool and not isolated):
        return
    try:
        result = close()
        if inspect.isawaitable(result):
            run_async(result)
    except Exception as error:
        logger.warning("%s.close raised %r", type(env).__name__, error)
