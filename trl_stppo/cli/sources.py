"""Dataclasses and constants from the text of their modules, without the seconds that importing those takes.

What is made of a dataclass has its fields and nothing else: enough to know flags, types and choices by.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Source:
    """A module whose attributes are made of its text when they are asked for; use `source`.

    Args:
        name: of the module, in a package.
    """

    def __init__(self, name: str) -> None:
        self._name, (top, *rest) = name, name.split(".")
        spec = importlib.util.find_spec(top)
        path = Path(str(spec and spec.origin)).parent.joinpath(*rest)
        self._package = [top, *rest] if path.is_dir() else [top, *rest[:-1]]
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.statements: dict[str, Any] = {}
        """Name -> the statement that binds it: the outermost, and of these the first."""
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for name in _bound(node):
                self.statements.setdefault(name, node)

    def __getattr__(self, name: str) -> Any:
        """What a name stands for."""
        if name not in self.__dict__.get("statements", {}):
            raise AttributeError(name)
        self.__dict__[name] = made = self._made(name, self.statements[name])
        return made

    def _made(self, name: str, node: ast.AST) -> Any:
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.FunctionDef):
            return self._executed(node)
        if isinstance(node, ast.Assign):
            return self._value(node.value)
        assert isinstance(node, ast.Import | ast.ImportFrom)
        original = next(a.name for a in node.names if name in (a.asname, a.name))
        if isinstance(node, ast.Import):
            return importlib.import_module(original)
        package = self._package[: len(self._package) - node.level + 1] if node.level else []
        module = ".".join([*package, *filter(None, [node.module])])
        try:
            return getattr(source(module), original)
        except AttributeError:
            return source(f"{module}.{original}")

    def _class(self, node: ast.ClassDef) -> Any:
        bases = tuple(self._value(base) for base in node.bases)
        if any(issubclass(base, Enum | str) for base in bases):
            return self._executed(node)
        is_data = any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)
        own = [
            (ast.unparse(n.target), self._value(n.annotation), self._value(n.value))
            for n in node.body
            if is_data
            and isinstance(n, ast.AnnAssign)
            and "ClassVar" not in ast.unparse(n.annotation)
        ]
        made = make_dataclass(node.name, own, bases=bases)
        made.__module__ = self._name
        return made

    def _value(self, expression: ast.expr | None) -> Any:
        if expression is None:  # of a field without a default
            return field()
        code = compile(ast.Expression(expression), self._name, "eval", dont_inherit=True)
        return eval(code, self._scope(expression))

    def _executed(self, definition: ast.ClassDef | ast.FunctionDef) -> Any:
        scope, module = self._scope(definition), ast.Module([definition], [])
        exec(compile(module, self._name, "exec", dont_inherit=True), scope)
        return scope[definition.name]

    def _scope(self, node: ast.AST) -> dict[str, Any]:
        """What names in a piece of text stand for, but for those that cannot be told."""
        scope: dict[str, Any] = {"__name__": self._name}
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for name in names & self.statements.keys() - {*dir(builtins), getattr(node, "name", "")}:
            with suppress(Exception):
                scope[name] = getattr(self, name)
        return scope


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def source(name: str) -> Any:
    """A module as text; those of Python itself are imported."""
    is_python = name.partition(".")[0] in sys.stdlib_module_names
    return importlib.import_module(name) if is_python else Source(name)


def configs(*, whole: bool) -> list[tuple[type, Mapping[str, Any]]]:
    """The trainers' configurations, each with the variants that it knows.

    Args:
        whole: imported. Otherwise their fields alone, where the text can be made sense of.
    """

    def read(module: Callable[[str], Any]) -> list[tuple[type, Mapping[str, Any]]]:
        with_critic = module("trl_stppo.trainer.stppo_config")
        without = module("trl_stppo.trainer.stgrpo_config")
        return [
            (with_critic.STPPOConfig, with_critic.VARIANTS),
            (without.STGRPOConfig, without.GROUP_VARIANTS),
        ]

    if not whole:
        with suppress(Exception):
            return read(source)
    return read(importlib.import_module)
