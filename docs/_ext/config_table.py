"""The directive `config-table`: a configuration's own fields as a table, inherited ones by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HEADINGS = ("field", "type", "default", "meaning")
TRL = "https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig"
TRANSFORMERS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"


def own_fields(config: type) -> list[dataclasses.Field[Any]]:
    """The fields that the class itself names, in its order."""
    known = {spec.name: spec for spec in dataclasses.fields(config)}
    return [known[name] for name in vars(config).get("__annotations__", {}) if name in known]


def inherited_fields(config: type) -> Iterator[tuple[type, list[str]]]:
    """Per parent, the nearest first, the fields that it is the last one to name.

    What is not ours is left to the configuration that inherits from it directly.
    """
    seen = {spec.name for spec in own_fields(config)}
    indirect = is_ours(config.__mro__[1])
    for parent in config.__mro__[1:]:
        if not dataclasses.is_dataclass(parent) or (indirect and not is_ours(parent)):
            continue
        names = [spec.name for spec in own_fields(parent) if spec.name not in seen]
        seen.update(names)
        if names:
            yield parent, names


def is_ours(config: type) -> bool:
    """Whether the class is of this package."""
    return config.__module__.startswith("trl_stppo.")


def default_of(spec: dataclasses.Field[Any]) -> str:
    """The default as one would write it."""
    if spec.default_factory is not dataclasses.MISSING:
        return repr(spec.default_factory())
    return "required" if spec.default is dataclasses.MISSING else repr(spec.default)


def anchor(config: type, name: str) -> str:
    """Where a field's row is on the page."""
    return f"{config.__name__.lower()}-{name.replace('_', '-')}"


class ConfigTable(SphinxDirective):
    """One argument: the dotted name of a configuration class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table, then a list of parents with their fields."""
        module, _, name = self.arguments[0].rpartition(".")
        config = getattr(importlib.import_module(module), name)
        rows = [
            (
                anchor(config, spec.name),
                [
                    nodes.literal(text=spec.name),
                    nodes.literal(text=str(spec.type)),
                    nodes.literal(text=default_of(spec)),
                    nodes.inline(text=spec.metadata.get("help", "")),
                ],
            )
            for spec in own_fields(config)
        ]
        entries = [self._parent(*entry) for entry in inherited_fields(config)]
        parents = nodes.bullet_list("", *(nodes.list_item("", entry) for entry in entries))
        return [_table(rows), parents]

    def _parent(self, parent: type, names: list[str]) -> nodes.paragraph:
        ours = is_ours(parent)
        upstream = TRL if parent.__module__.startswith("trl.") else TRANSFORMERS
        paragraph = nodes.paragraph("", "", nodes.Text("From "), nodes.literal(text=parent.__name__))
        paragraph += nodes.Text(": ")
        for number, name in enumerate(sorted(names)):
            uri = f"#{anchor(parent, name)}" if ours else upstream
            paragraph += nodes.Text(", " if number else "")
            paragraph += nodes.reference("", "", nodes.literal(text=name), refuri=uri)
        return paragraph


def _table(rows: Iterable[tuple[str, list[nodes.Node]]]) -> nodes.table:
    group = nodes.tgroup(cols=len(HEADINGS))
    group += [nodes.colspec(colwidth=1) for _ in HEADINGS]
    heads = [nodes.entry("", nodes.paragraph(text=title)) for title in HEADINGS]
    group += nodes.thead("", nodes.row("", *heads))
    body = nodes.tbody()
    for identifier, cells in rows:
        entries = [nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells]
        body += nodes.row("", *entries, ids=[identifier])
    group += body
    return nodes.table("", group, classes=["config-table"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("config-table", ConfigTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
