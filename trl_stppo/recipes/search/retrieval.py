"""The interface of search, and BM25 in memory, with the optional package bm25s."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

_WORD = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus. Both fields are searched; the style "plain" shows `text` alone."""

    title: str
    text: str


@runtime_checkable
class Retriever(Protocol):
    """An object that ranks passages for a query, called from several threads at once."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first; an empty list if nothing matches."""
        ...


class RankingRetriever(ABC):
    """A retriever with scores; subclasses implement the ranking."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` >= 1 passages, best first, then in corpus order; none for a blank query."""
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the result of `search` with scores."""
        check_top_k(top_k)
        return self._ranked(query, top_k) if query.strip() else []

    @abstractmethod
    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Rank for checked arguments."""


def check_top_k(top_k: int) -> None:
    """Raise a ValueError unless `top_k` >= 1."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; must be >= 1.")


def best(scores: Any, top_k: int) -> list[tuple[int, float]]:
    """Return index and score of the highest scores above 0, best first, equal ones in order.

    bm25s leaves the order of ties open. `scores` is a numpy array with one score per passage.
    """
    places = scores.nonzero()[0]
    found = scores[places]
    if len(found) > top_k:
        ordered = found.copy()
        ordered.partition(len(found) - top_k)
        high = found >= ordered[len(found) - top_k]
        places, found = places[high], found[high]
    order = (-found).argsort(kind="stable")[:top_k]
    return list(zip(places[order].tolist(), found[order].tolist(), strict=True))


def words(text: str) -> list[str]:
    """Split a text into lower-case words of letters, digits and underscores.

    Identifiers stay one word (`split_drive`), dotted paths are split (`heapq.merge` -> heapq, merge), and
    there is neither stemming nor a stop-word list: `all` and `not` are names too.
    """
    return _WORD.findall(text.lower())


class BM25Retriever(RankingRetriever):
    """BM25 (as in Lucene) over title and text, in memory. Deterministic, thread-safe.

    For the documentation of programs: see `words`. `BM25Index` is for text of any language.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Build the index, in memory; at least one passage must contain a word."""
        corpus = [words(f"{passage.title} {passage.text}") for passage in passages]
        if not any(corpus):
            raise ValueError(f"passages has {len(corpus)} passages; at least one must have a word.")
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
    """Import the package, or raise an error with the command that installs it."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("BM25 needs bm25s: pip install bm25s.") from error
    return bm25s
