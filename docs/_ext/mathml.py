"""Formulas as MathML: every browser shows it, nothing is fetched, no LaTeX is installed."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

# `log x`, where nothing else keeps the name of a function and its argument apart.
APPLIED = re.compile(r"(<mo>&ApplyFunction;</mo>)(?=\s*<m(?:i|sub|sup)>)")


def _markup(text: str, *, as_block: bool) -> str:
    return APPLIED.sub(r'\1<mspace width="0.17em"></mspace>', tex2mathml(text, as_block=as_block))


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_markup(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    formula = _markup(node.astext(), as_block=True)
    self.body.append(f'<div class="math-block">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer that conf.py names."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
