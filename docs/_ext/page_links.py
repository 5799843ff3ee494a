"""Titles for links whose text is a file name, as `[methods.md](methods.md)`, which suits GitHub.

Pages of lab/ are in no table of contents on purpose.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

BARE = re.compile(r"\[([\w-]+\.md)\]\((\1(?:#[\w-]+)?)\)")


def titled(text: str) -> str:
    """Empty link texts, which the Markdown parser fills with the title of the page or section."""
    return BARE.sub(r"[](\2)", text)


def _source_read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = ("---\norphan: true\n---\n" if page.startswith("lab/") else "") + titled(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook into the reading of pages."""
    app.connect("source-read", _source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
