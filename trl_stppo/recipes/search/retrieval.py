"""Searching passages of text: the interface, and BM25 over a list held in memory.

BM25 needs the optional package bm25s; it is imported when a `BM25Retriever` is built.
"""

import re
from abc import ABC, abstractmethod
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


class RankingRetriever(ABC):
    """A retriever with scores; its kinds say only how they rank."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first; none for a blank query.

        Equal scores come in the order of the corpus.

        Args:
            query: free text.
            top_k: how many passages at most, >= 1.

        Raises:
            ValueError: `top_k` is smaller than 1.
        """
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """As `search`, with scores."""
        check_top_k(top_k)
        return self._ranked(query, top_k) if query.strip() else []

    @abstractmethod
    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """`ranked`, for arguments that are checked."""


def check_top_k(top_k: int) -> None:
    """Raise a ValueError if there is nothing to be asked for."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1. Ask for 1 passage or more.")


def best(scores: Any, top_k: int) -> list[tuple[int, float]]:
    """The places of the highest scores above 0, best first, equal ones in order.

    bm25s's own choice leaves the order of ties open, and with it what an agent is shown.

    Args:
        scores: one per passage, a numpy array.
        top_k: how many at most.
    """
    places = scores.nonzero()[0]
    found = scores[places]
    if len(found) > top_k:
        ordered = found.copy()
        ordered.partition(len(found) - top_k)
        kept = found >= ordered[len(found) - top_k]
        places, found = places[kept], found[kept]
    order = (-found).argsort(kind="stable")[:top_k]
    return list(zip(places[order].tolist(), found[order].tolist(), strict=True))


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and underscores.

    Identifiers stay whole (`split_drive`, `DictReader`), dotted paths fall apart
    (`heapq.merge` -> heapq, merge), and there is neither stemming nor a stop-word list: `all` and
    `not` are names worth finding.
    """
    return _WORD.findall(text.lower())


class BM25Retriever(RankingRetriever):
    """BM25 (as in Lucene) over title and text, in memory. Deterministic, thread-safe.

    Made for the documentation of programs: see `words`. Text of any language is for `BM25Index`.
    """

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

    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        known = [word for word in words(query) if word in self._known_words]
        if not known:
            return []
        found = best(self._index.get_scores(known), top_k)
        return [(self._passages[place], score) for place, score in found]


def import_bm25s() -> Any:
    """The package, or an error that says how to install it."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            "BM25 needs bm25s: pip install bm25s, or pass a retriever of your own."
        ) from error
    return bm25s
