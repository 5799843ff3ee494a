"""Old names of what has moved: until 0.3 they lead to the new ones, with a DeprecationWarning.

Modules are found by a finder of the import system, names in modules that stay by their `__getattr__`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old module -> new one; its submodules go with it.
MODULES = {
    "trl_stppo.envs.choices": "trl_stppo.recipes.search.choices",
    "trl_stppo.envs.retrieval": "trl_stppo.recipes.search.retrieval",
    "trl_stppo.envs.retrievers": "trl_stppo.recipes.search.retrievers",
    "trl_stppo.envs.search": "trl_stppo.recipes.search.env",
    "trl_stppo.envs.search_prompts": "trl_stppo.recipes.search.prompts",
    "trl_stppo.envs.search_tags": "trl_stppo.recipes.search.tags",
    "trl_stppo.envs.search_view": "trl_stppo.recipes.search.view",
    "trl_stppo.envs.squad": "trl_stppo.recipes.search.squad",
    "trl_stppo.envs.stdlib_docs": "trl_stppo.recipes.search.stdlib_docs",
    "trl_stppo.rewards": "trl_stppo.recipes.search.rewards",
}
# Module that stays -> names that have left it -> where they are.
NAMES = {
    "trl_stppo.envs": {
        "SearchEnv": "trl_stppo.recipes.search",
        "StdlibSearchEnv": "trl_stppo.recipes.search",
    },
}


def attribute(module: str, name: str) -> Any:
    """What has left a module, for its `__getattr__`.

    Raises:
        AttributeError: nothing of that name has.
    """
    if name not in NAMES[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = NAMES[module][name]
    _warn(f"{module}.{name}", f"{new}.{name}", stacklevel=4)
    return getattr(importlib.import_module(new), name)


def new_name(module: str) -> str | None:
    """The name that a module has now; None where it has not moved."""
    head, tail = module, ""
    while head not in MODULES:
        head, dot, last = head.rpartition(".")
        if not dot:
            return None
        tail = f".{last}{tail}"
    return MODULES[head] + tail


class _Finder(MetaPathFinder, Loader):
    """Puts the new module in the place of the old one: one module under two names, never a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a module that has moved."""
        return ModuleSpec(fullname, self) if new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Import it under its new name."""
        old = module.__name__
        new = str(new_name(old))
        _warn(old, new, stacklevel=3)
        # What stands in `sys.modules` afterwards is what the import gives.
        sys.modules[old] = importlib.import_module(new)


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(
        f"{old} has moved to {new}; the old name goes in 0.3. Use the new one.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def install() -> None:
    """Answer for the old names. First of all finders: another would load a submodule twice."""
    sys.meta_path.insert(0, _Finder())
