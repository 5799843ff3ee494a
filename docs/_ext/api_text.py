"""Docstrings and base classes as autodoc wants them.

Our docstrings are plain text with a little Markdown; the settings that configurations list are shown as
tables instead; classes that only divide a trainer into files are nobody's to know.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

# The form in which TRL's own documentation links to a class.
BRACKETED = re.compile(r"\[`~?([\w.]+)`\]")
SECTION = re.compile(r"([A-Z]\w+):")
RESULT = re.compile(r"    (\w+): (.*)")
SEVERAL = re.compile(r"    (\w+(?:, \w+)+): (.*)")
# What is public: `__all__` of these.
PUBLIC = ("trl_stppo", "trl_stppo.core", "trl_stppo.envs")


def adapt(lines: list[str], *, without_parameters: bool = False) -> list[str]:
    """The lines of a docstring in reStructuredText.

    Args:
        lines: indentation removed.
        without_parameters: cut the section `Parameters:`, whose content the page has as a table.
    """
    adapted: list[str] = []
    section, listed = None, False
    for line, then, later in zip(lines, [*lines[1:], ""], [*lines[2:], "", ""], strict=False):
        header = SECTION.fullmatch(line)
        if header and then.startswith(" "):
            section = header[1]
            if section == "Returns":
                adapted.append(":returns:")
                listed = bool(RESULT.fullmatch(then))
                continue
        elif line.strip() and not line.startswith(" "):
            section = None
        if without_parameters and section == "Parameters":
            continue
        line = BRACKETED.sub(r"``\1``", line)
        line = line if "`" in line else line.replace("|", r"\|")
        if section == "Returns":
            line = _result(line, listed=listed)
        elif section == "Attributes" and (several := SEVERAL.fullmatch(line)):
            first, *others = several[1].split(", ")
            adapted += [f"    {name}: see `{first}`." for name in others]
            line = f"    {first}: {several[2]}"
        # A formula or an example stands apart, indented.
        elif line.endswith(":") and not then.strip() and _indent(later) > _indent(line):
            line += ":"
        adapted.append(line)
    return adapted


def _result(line: str, *, listed: bool) -> str:
    """A line of `Returns:`; results with names of their own become a list."""
    if not listed or not line.strip():
        return line
    if _indent(line) > 4:
        return "  " + line
    named = RESULT.fullmatch(line)
    return f"    - **{named[1]}**: {named[2]}" if named else f"    - {line.strip()}"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def public_bases(bases: tuple[type, ...], public: set[str]) -> list[type]:
    """The bases, with those of ours that are not public replaced by theirs."""
    found: list[type] = []
    for base in bases:
        ours = base.__module__.split(".")[0] == "trl_stppo"
        known = [base] if not ours or base.__name__ in public else public_bases(base.__bases__, public)
        found += [entry for entry in known if entry not in found]
    return [base for base in found if base is not object] or [object]


def _process_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    config = inspect.isclass(thing) and dataclasses.is_dataclass(thing) and name.endswith("Config")
    lines[:] = adapt(lines, without_parameters=config)
    if what == "property" and lines:
        # Napoleon takes what stands before a colon for a type.
        lines[0] = lines[0].replace(": ", " -- ", 1)


def _process_signature(
    app: Sphinx,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    signature: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Two hundred settings are no signature; the page has them as a table.

    Defaults that are made anew each time are written so that Sphinx can read them.
    """
    config = inspect.isclass(thing) and dataclasses.is_dataclass(thing) and name.endswith("Config")
    if config:
        return "(**settings)", None
    return signature and signature.replace("<factory>", "..."), result


def _process_bases(app: Sphinx, name: str, thing: Any, options: Any, bases: list[Any]) -> None:
    public = {entry for module in PUBLIC for entry in importlib.import_module(module).__all__}
    bases[:] = public_bases(tuple(bases), public)


def setup(app: Sphinx) -> dict[str, bool]:
    """Before napoleon, which takes the sections apart."""
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-process-bases", _process_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
