"""Searching passages of text: the interface, and BM25 over a list held in memory.

BM25 needs the optional package bm25s; it is imported when a `BM25Retriever` is built.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

_WORD = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Passage:
    """One thing that can be found. Both fields are searched.

    Where readers are shown `text` alone, it has to name what it is about.
    """

    title: str
    text: str


@runtime_checkable
class Retriever(Protocol):
    """Anything that ranks passages for a query. Called from several threads at once."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first; an empty list when nothing matches."""
        ...


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and underscores.

    Identifiers stay whole (`split_drive`, `DictReader`), dotted paths fall apart
    (`heapq.merge` -> heapq, merge), and there is neither stemming nor a stop-word list: `all` and
    `not` are names worth finding.
    """
    return _WORD.findall(text.lower())


class BM25Retriever:
    """BM25 (Robertson's variant, as in Lucene) over title and text. Deterministic, thread-safe."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Build the index.

        Args:
            passages: what can be found; kept in memory.

        Raises:
            ValueError: there is no passage with a word in it.
            ImportError: bm25s is not installed.
        """
        corpus = [words(f"{passage.title} {passage.text}") for passage in passages]
        if not any(corpus):
            raise ValueError(
                f"passages holds {len(corpus)} passages and none contains a word; "
                "BM25Retriever needs at least one. Pass a sequence of Passage(title, text)."
            )
        self._passages = tuple(passages)
        self._known_words = {word for document in corpus for word in document}
        self._index: Any = import_bm25s().BM25()
        self._index.index(corpus, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages that share a word with the query, best first.

        Equal scores come in the order of the passages. A query without any known word finds
        nothing.

        Args:
            query: free text.
            top_k: how many passages to return at most, >= 1.

        Raises:
            ValueError: `top_k` is smaller than 1.
        """
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """As `search`, with scores."""
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1. Ask for 1 passage or more.")
        known = [word for word in words(query) if word in self._known_words]
        if not known:
            return []
        # Scores are ranked here, not by bm25s: its top-k leaves the order of ties open.
        scores = self._index.get_scores(known)
        ranking = (-scores).argsort(kind="stable")[:top_k]
        return [(self._passages[i], float(scores[i])) for i in ranking if scores[i] > 0]


def import_bm25s() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "BM25 needs bm25s: pip install trl-stppo[search], or pass a retriever of your own."
        ) from error
    return bm25s
