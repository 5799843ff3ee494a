"""Lay out found passages, and cut them to a limit of characters or tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trl_stppo.recipes.search.retrieval import Passage
from trl_stppo.recipes.search.tags import TAG

Style = Literal["search-r1", "plain"]
STYLES = ("search-r1", "plain")
NOTHING_FOUND = "<information> nothing found </information>"
_FRAME = {"search-r1": "<information>{}</information>", "plain": "<information> {} </information>"}


def framed(shown: str, style: Style) -> str:
    """Return the text of passages in an `<information>` block, or `NOTHING_FOUND` for an empty text."""
    return _FRAME[style].format(shown) if shown else NOTHING_FOUND


@dataclass(frozen=True)
class Layout:
    """Passages joined into one text, with the positions at which the text may end."""

    shown: str
    # Allowed ends, ascending: ends of words, never within a heading.
    cuts: Sequence[int]
    # The first passage without its heading, for a small limit.
    first: str


def lay_out(passages: Sequence[Passage], style: Style) -> Layout:
    """Join the passages into one text, with the positions at which the text may end.

    "search-r1" numbers them, with titles, one per line; "plain" joins the texts with " | ".
    """
    shown, cuts, first = "", [], ""
    for number, passage in enumerate(passages, start=1):
        text, title = _one_line(passage.text), _one_line(passage.title)
        if style == "plain":
            shown += " | " if number > 1 else ""
        else:
            heading = f'Doc {number}(Title: "{title}") ' if title else f"Doc {number} "
            shown += ("\n" if number > 1 else "") + heading
            if not text:
                cuts.append(len(shown))
        cuts += _word_ends(text, len(shown))
        shown += text
        first = first or text or title
    return Layout(shown, cuts, first)


def fit(layout: Layout, fits: Callable[[str], bool]) -> str:
    """Return the longest beginning of a layout that fits, in whole words if at least one word fits.

    A heading that leaves no room for a word is dropped. `fits` is called about 1 + log2(words) times.
    """
    if fits(layout.shown):
        return layout.shown
    first = layout.first
    return (
        _longest(layout.shown, [0, *layout.cuts], fits)
        or _longest(first, [0, *_word_ends(first)], fits)
        or _longest(first, range(len(first) + 1), fits)
    )


def _word_ends(text: str, start: int = 0) -> list[int]:
    return [start + word.end() for word in re.finditer(r"\S+", text)]


def _longest(shown: str, ends: Sequence[int], fits: Callable[[str], bool]) -> str:
    """Return the longest beginning that fits, by bisection over `ends`. The empty text always fits."""
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(shown[: ends[middle]]):
            low = middle
        else:
            high = middle
    return shown[: ends[low]]


def _one_line(text: str) -> str:
    """Return a passage's text on one line, without tags that could close the block or be an action."""
    return " ".join(TAG.sub(" ", text).split())
