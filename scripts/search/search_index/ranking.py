"""The base class of both indexes."""

from abc import ABC, abstractmethod

from search_env.retrieval import Passage


class RankingRetriever(ABC):
    """Base class of retrievers with scores. Subclasses implement `_ranked`."""

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages, best first, ties in corpus order. A blank query finds none."""
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the passages of `search`, each with its score."""
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; must be >= 1.")
        return self._ranked(query, top_k) if query.strip() else []

    @abstractmethod
    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Rank the passages for a query that is not blank and a valid `top_k`."""
