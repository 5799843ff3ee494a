"""Tables that stay readable: long names break at their dots, and on a phone each row becomes a list.

A table with much text in a cell or in a row gets the class `stack`; its cells begin with the heading of
their column, which the style sheet shows on narrow screens alone.
"""

from __future__ import annotations

import re
from html import escape

from docutils import nodes
from sphinx.application import Sphinx

LONG = 40  # characters of a cell
WIDE = 80  # characters of a row
NAME = 16  # characters of a name that may break


def _mark(app: Sphinx, doctree: nodes.document) -> None:
    for table in doctree.findall(nodes.table):
        heads = [cell.astext() for head in table.findall(nodes.thead) for cell in head[0]]
        rows = [row for body in table.findall(nodes.tbody) for row in body]
        stack = False
        for row in rows:
            stack |= sum(len(cell.astext()) for cell in row) > WIDE
            for number, cell in enumerate(row):
                if len(cell.astext()) > LONG:
                    cell["classes"].append("long")
                    stack = True
                _let_names_break(cell, first=number == 0)
        if stack:
            table["classes"].append("stack")
            for row in rows:
                _label(row, heads)


def _let_names_break(cell: nodes.Element, *, first: bool) -> None:
    """Names in code get places to break at, as `core.` or `tests/`; those in first columns stay whole."""
    for name in [] if first else list(cell.findall(nodes.literal)):
        if len(name.astext()) > NAME:
            pieces = re.sub(r"(?<=[./_=])(?=\w{3})", "<wbr>", escape(name.astext(), quote=False))
            markup = f'<code class="docutils literal notranslate">{pieces}</code>'
            name.replace_self(nodes.raw("", markup, format="html"))


def _label(row: nodes.Element, heads: list[str]) -> None:
    for cell, head in list(zip(row, heads, strict=False))[1:]:
        if head and cell.astext():
            cell[0].insert(0, nodes.inline("", f"{head}: ", classes=["cell-label"]))


def setup(app: Sphinx) -> dict[str, bool]:
    """After a page has been read."""
    app.connect("doctree-read", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
