"""How found passages are shown, and cut to a budget of characters or tokens."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from trl_stppo.envs.retrieval import Passage

Style = Literal["search-r1", "plain"]
STYLES = ("search-r1", "plain")
NOTHING_FOUND = "<information> nothing found </information>"
_ANY_TAG = re.compile(r"</?(?:search|answer|information|think)>")
_FRAME = {"search-r1": "<information>{}</information>", "plain": "<information> {} </information>"}


def framed(shown: str, style: Style) -> str:
    """The block that the policy reads; never an empty one."""
    return _FRAME[style].format(shown) if shown else NOTHING_FOUND


def lay_out(passages: Sequence[Passage], style: Style) -> tuple[str, list[int]]:
    """The passages as one text, and where it may be cut: at ends of words, not within headings.

    "search-r1" numbers them, with titles, one per line; "plain" joins the texts with " | ".
    """
    shown, cuts = "", []
    for number, passage in enumerate(passages, start=1):
        text, title = _tame(passage.text), _tame(passage.title)
        if style == "plain":
            shown += " | " if number > 1 else ""
        else:
            heading = f'Doc {number}(Title: "{title}") ' if title else f"Doc {number} "
            shown += ("\n" if number > 1 else "") + heading
        cuts += [len(shown) + word.end() for word in re.finditer(r"\S+", text)]
        shown += text
    return shown, cuts


def fit(shown: str, cuts: Sequence[int], fits: Callable[[str], bool]) -> str:
    """The longest beginning that fits: whole words, unless not even the first one does.

    Asks about 1 + log2(words) times.

    Args:
        shown: the whole text.
        cuts: where it may be cut, ascending.
        fits: whether a beginning is short enough; true of "".
    """
    if fits(shown):
        return shown
    kept = _longest(shown, [0, *cuts], fits)
    if kept:
        return kept
    first = cuts[0] if cuts else len(shown)
    return _longest(shown, range(first), fits)


def _longest(shown: str, ends: Sequence[int], fits: Callable[[str], bool]) -> str:
    """The longest beginning that fits, by bisection; the first one, "", is known to."""
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(shown[: ends[middle]]):
            low = middle
        else:
            high = middle
    return shown[: ends[low]]


def _tame(text: str) -> str:
    """One line without our tags: a passage must not close the block or pose as an action."""
    return " ".join(_ANY_TAG.sub(" ", text).split())
