"""Answers that upstream works out again in every training, remembered: a sixth of a short one's time."""

import functools
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def take() -> None:
    """In this process of tests; those that it starts do all of it."""
    from accelerate.utils import imports, memory
    from datasets import arrow_dataset
    from jinja2 import Environment
    from torch import cuda, mtia, xpu

    # After each training, of everything that has been imported since. The collector comes by itself.
    memory.gc = SimpleNamespace(collect=functools.partial(gc.collect, 1))
    # Reads a package's metadata several times a step.
    imports._is_package_available = functools.cache(imports._is_package_available)
    Environment.compile = _remembered(Environment.compile)
    # Names files of a cache, which tables that were made in memory do not have.
    numbers = itertools.count()
    arrow_dataset.generate_fingerprint = lambda dataset: f"{next(numbers):016x}"
    # Each seed is noted for devices that are not there, with where it was set.
    for module in (cuda.random, xpu.random, mtia):
        if not cuda.is_available():
            module._lazy_call = lambda call, **options: None


def _remembered(compile: Callable[..., Any]) -> Callable[..., Any]:
    """The card of each checkpoint has the same template, which is compiled each time."""
    codes: dict[tuple[Any, str], Any] = {}

    @functools.wraps(compile)
    def wrapper(environment: Any, source: Any, *args: Any, **options: Any) -> Any:
        if args or options or not isinstance(source, str):
            return compile(environment, source, *args, **options)
        key = (environment, source)
        if key not in codes:
            codes[key] = compile(environment, source)
        return codes[key]

    return wrapper
