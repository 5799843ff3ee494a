"""Escape untrusted text in Markdown."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_\[\]|~$#])")
# Beginnings of lists, and underlines of headings.
_OPENING = re.compile(r"^(\d*)([-+=.)])")
_BAR = re.compile(r"(?<!\\)\|")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_URL = re.compile(r"(?i)\b(https?|ftp|mailto|www)([:.])")


def plain(text: object, limit: int | None = None) -> str:
    """Return a text as one line of printable characters, cut to `limit` characters with an ellipsis."""
    words = "".join(c if _printable(c) else " " for c in str(text))
    line = " ".join(words.split())
    if limit is not None and len(line) > limit:
        line = line[: limit - 1].rstrip() + "…"
    return line


def _printable(character: str) -> bool:
    # Cc control, Cf format (with bidirectional overrides), Cs lone surrogates, Co private.
    # Emoji and some scripts need the joiner.
    return character == "\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co")


def escaped(text: object, limit: int | None = None) -> str:
    """Escape a text so that Markdown shows it literally, links and HTML included."""
    line = "".join(_ENTITIES.get(c, c) for c in plain(text, limit))
    line = _OPENING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", line))
    # Bare addresses and names would become links.
    return _URL.sub(r"\1<span></span>\2", line.replace("@", "&#64;"))


def code(text: object, limit: int | None = None) -> str:
    """Return a text as inline code in Markdown."""
    line = plain(text, limit)
    if not line:
        return ""
    runs = [len(run) for run in re.findall("`+", line)]
    ticks = "`" * (max(runs, default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def fenced(text: str, language: str = "", limit: int | None = None) -> str:
    """Return a code block whose fence is longer than any run of backticks in the text."""
    lines = ["".join(c for c in line if c == "\t" or _printable(c)) for line in text.split("\n")]
    body = "\n".join(lines)
    if limit is not None and len(body) > limit:
        body = body[: limit - 1].rstrip() + "…"
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{ticks}{language}\n{body}\n{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells that are Markdown, or an empty text if there are no rows."""
    cells = ([_BAR.sub(r"\\|", text) for text in row] for row in (head, *rows))
    first, *lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([first, "|" + "---|" * len(head), *lines]) if lines else ""
