"""BM25 over an index on disk: memory-mapped, so that opening it costs nothing but the vocabulary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_stppo.envs.retrieval import Passage, import_bm25s

from .bm25_build import KIND, PEAKS, stop_words, terms_of
from .corpus import PassageStore
from .folders import read_manifest

# Scores are sums of a few float32; two ways to add up the same ones differ by less.
_MARGIN = 1e-5


class BM25Index:
    """A folder made by `build_bm25`. Deterministic, thread-safe, shared by processes through the OS."""

    def __init__(self, folder: str | Path) -> None:
        """Open the index.

        Args:
            folder: what `build_bm25` or scripts/build_index.py made.

        Raises:
            IndexFolderError: no complete index of this kind.
            ImportError: bm25s is not installed.
        """
        self.folder = Path(folder)
        self.settings = read_manifest(self.folder, KIND)
        self._stopped = stop_words(self.settings["stop_words"])
        index = import_bm25s().BM25.load(self.folder, mmap=True, show_progress=False)
        self._vocabulary: dict[str, int] = index.vocab_dict
        self._scores: Any = np.asarray(index.scores["data"])
        self._documents: Any = np.asarray(index.scores["indices"])
        self._starts: Any = np.asarray(index.scores["indptr"])
        self._peaks: Any = np.load(self.folder / PEAKS)
        self._passages = PassageStore(self.folder)

    def __len__(self) -> int:
        return len(self._passages)

    def __reduce__(self) -> tuple[Any, ...]:
        return BM25Index, (self.folder,)  # another process maps the files itself

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages that share a word with the query, best first.

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
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1. Ask for 1 passage or more.")
        asked = Counter(t for t in terms_of(query, self._stopped) if t in self._vocabulary)
        postings = []
        for term, weight in asked.items():
            number = self._vocabulary[term]
            place = slice(int(self._starts[number]), int(self._starts[number + 1]))
            documents, scores = self._documents[place], self._scores[place]
            bound = weight * float(self._peaks[number])
            postings.append(Postings(number, documents, scores, float(weight), bound))
        found = best(postings, len(self), top_k)
        return [(self._passages[place], score) for place, score in found]


@dataclass(frozen=True)
class Postings:
    """The passages with one term of the query.

    Attributes:
        term: its number.
        documents: numbers of passages, ascending.
        scores: of the term in each of them.
        weight: how often the query has the term.
        bound: what the term adds to a passage at most, > 0.
    """

    term: int
    documents: Any
    scores: Any
    weight: float
    bound: float


def best(postings: Sequence[Postings], total: int, top_k: int) -> list[tuple[int, float]]:
    """The passages with the highest sums of scores; exactly those that adding everything up gives.

    Rare terms come first. As soon as `top_k` passages have more than all remaining terms together
    could give, no new passage can enter, and the long lists of frequent terms are only looked up
    for the few that are still in the race (MaxScore; Turtle and Flood 1995).

    Args:
        postings: one per term; none may be empty.
        total: passages in the corpus.
        top_k: how many to return at most.

    Returns:
        (passage, score), best first, equal scores by number.
    """
    if not postings:
        return []
    # The number breaks ties, so that sums are added up in one order whatever the query's.
    terms = sorted(postings, key=lambda p: (-p.bound, p.term))
    rest = np.cumsum([0.0, *(p.bound for p in reversed(terms))])[::-1]
    sums = np.zeros(total, dtype=np.float32)
    threshold, used = 0.0, 0
    for used, term in enumerate(terms, start=1):
        sums[term.documents] += term.scores * np.float32(term.weight)
        if used < len(terms) and len(term.documents) >= top_k:
            reached = sums[term.documents]
            if reached.max() > rest[used]:
                threshold = max(threshold, float(-np.partition(-reached, top_k - 1)[top_k - 1]))
        if threshold * (1 - _MARGIN) > rest[used]:
            break
    running = _union([term.documents for term in terms[:used]], sums)
    for place in range(used, len(terms)):
        running = running[sums[running] + rest[place] >= threshold * (1 - _MARGIN)]
        term = terms[place]
        # The same integer type on both sides, or the whole list would be copied.
        spots = np.searchsorted(term.documents, running.astype(term.documents.dtype))
        spots[spots == len(term.documents)] = 0
        hit = term.documents[spots] == running
        sums[running[hit]] += term.scores[spots[hit]] * np.float32(term.weight)
    reached = sums[running]
    if len(running) > top_k:
        kept = reached >= -np.partition(-reached, top_k - 1)[top_k - 1]
        running, reached = running[kept], reached[kept]
    order = np.lexsort((running, -reached))[:top_k]
    return [(int(running[place]), float(reached[place])) for place in order]


def _union(lists: list[Any], sums: Any) -> Any:
    """All passages of the lists, each once."""
    if len(lists) == 1:
        return lists[0]
    if sum(map(len, lists)) < len(sums) // 16:
        return np.unique(np.concatenate(lists))
    return np.flatnonzero(sums)
