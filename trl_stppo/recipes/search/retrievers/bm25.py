"""BM25 with a memory-mapped index on disk. Opening the index loads only the vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np

from trl_stppo.recipes.search.retrieval import Passage, RankingRetriever, best, import_bm25s

from .bm25_build import KIND, stop_words, terms_of
from .corpus import PassageStore
from .folders import read_manifest


class BM25Index(RankingRetriever):
    """Retriever with a BM25 index that `build_bm25` wrote to a folder. Deterministic, thread-safe.

    bm25s scores every passage that has a word of the query; a search needs 4 bytes per passage of the
    corpus, and about 20 if most passages have one.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the index in `folder`. Raise `IndexFolderError` if the index is not complete."""
        self.folder = Path(folder)
        self.settings = read_manifest(self.folder, KIND)
        self._stopped = stop_words(self.settings["stop_words"])
        self._index: Any = import_bm25s().BM25.load(self.folder, mmap=True, show_progress=False)
        for name in ("data", "indices", "indptr"):
            # Still mapped, but faster to slice than a memmap.
            self._index.scores[name] = np.asarray(self._index.scores[name])
        self._passages = PassageStore(self.folder)

    def __len__(self) -> int:
        return len(self._passages)

    def __reduce__(self) -> tuple[Any, ...]:
        return BM25Index, (self.folder,)  # another process maps the files itself

    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        known = self._index.get_tokens_ids(terms_of(query, self._stopped))
        if not known:
            return []
        found = best(self._index.get_scores(known), top_k)
        return [(self._passages[place], score) for place, score in found]
