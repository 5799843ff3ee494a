"""Search indexes on disk, for corpora of millions of passages (docs/recipes.md)."""

from .bm25 import BM25Index, build_bm25
from .corpus import read_corpus
from .dense import DenseIndex, DenseSettings, build_dense
from .folders import IndexFolderError

__all__ = [
    "BM25Index",
    "DenseIndex",
    "DenseSettings",
    "IndexFolderError",
    "build_bm25",
    "build_dense",
    "read_corpus",
]
