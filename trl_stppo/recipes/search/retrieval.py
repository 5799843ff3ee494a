"""Retrievers by name, the interface `Retriever`, BM25 in memory (bm25s), and the corpus of its recipe."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "test"]


def _lines(name: str) -> list[Any]:
    with gzip.open(Path(__file__).parent / "stdlib" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@lru_cache(maxsize=1)
def passages() -> tuple[Passage, ...]:
    """Return the corpus: one short passage per documented name of the library."""
    return tuple(Passage(*line) for line in _lines("passages"))


def questions(split: Split) -> list[dict[str, Any]]:
    """Return a split's rows, with prompt (one user message), answers, hops (1 or 2), kind and name.

    No name is in both splits.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; allowed are 'train' and 'test'.")
    return _lines(split)


def stdlib_search_dataset(split: Split) -> datasets.Dataset:
    """Return the questions of a split as a data set for `SearchEnv`."""
    import datasets

    return datasets.Dataset.from_list(questions(split))


STDLIB = "stdlib"
# `cache` alone would open a name once per thread.
_lock = threading.Lock()


def open_retriever(name: str) -> Retriever:
    """Return the retriever with the name `name`. A process opens each name once.

    Args:
        name: `"http://host:8000/retrieve"` (or https) for a server, `"stdlib"` for the documentation of
            Python's library.

    Raises:
        ValueError: a name of another form.
    """
    kind, _, rest = name.partition(":")
    if name != STDLIB and not (kind in ("http", "https") and rest.strip("/")):
        raise ValueError(
            f'retriever is {name!r}; allowed are "http://HOST:PORT/retrieve", "stdlib" or an object.'
        )
    with _lock:
        return _open(name)


@cache
def _open(name: str) -> Any:
    if name == STDLIB:
        from trl_stppo.recipes.search.retrieval import passages

        return BM25Retriever(passages())
    from trl_stppo.recipes.search.remote import HttpRetriever

    return HttpRetriever(name)


_WORD = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus. Retrievers search title and text; the style "plain" shows only the text."""

    title: str
    text: str


@runtime_checkable
class Retriever(Protocol):
    """Interface of an object that finds passages for a query. Several threads call it at once."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first; an empty list if nothing matches."""
        ...


def check_top_k(top_k: int) -> None:
    """Raise a ValueError if `top_k` < 1."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; must be >= 1.")


def best(scores: Any, top_k: int) -> list[tuple[int, float]]:
    """Return indices and scores of the `top_k` highest scores above 0, best first, ties by index.

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


class BM25Retriever:
    """Retriever by BM25 (as in Lucene) over titles and texts in memory. Deterministic, thread-safe.

    For the documentation of programs: see `words`. `scripts/search/` has an index on disk, for text of any
    language.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Build the index in memory. At least one passage must contain a word."""
        corpus = [words(f"{passage.title} {passage.text}") for passage in passages]
        if not any(corpus):
            raise ValueError(f"passages has {len(corpus)} passages; at least one must have a word.")
        self._passages = tuple(passages)
        self._known_words = {word for document in corpus for word in document}
        self._index: Any = import_bm25s().BM25()
        self._index.index(corpus, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first, ties in corpus order. A blank query finds none."""
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the passages of `search`, each with its score."""
        check_top_k(top_k)
        known = [word for word in words(query) if word in self._known_words]
        if not known:
            return []
        found = best(self._index.get_scores(known), top_k)
        return [(self._passages[place], score) for place, score in found]


def import_bm25s() -> Any:
    """Import bm25s, or raise an error with the command that installs the package."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("BM25 needs bm25s: pip install bm25s.") from error
    return bm25s
