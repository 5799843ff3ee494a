"""Marks cells with much text, so that a table scrolls sideways instead of crushing them."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

LONG = 40  # characters


def _mark(app: Sphinx, doctree: nodes.document) -> None:
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > LONG:
            cell["classes"].append("long")


def setup(app: Sphinx) -> dict[str, bool]:
    """After a page has been read."""
    app.connect("doctree-read", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
