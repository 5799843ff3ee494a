"""Retrievers: indexes on disk, and servers. Modules with optional packages load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .specs import open_retriever

if TYPE_CHECKING:
    from .bm25 import BM25Index
    from .bm25_build import build_bm25
    from .dense import DenseIndex, DenseSettings, build_dense
    from .remote import HttpRetriever

_MODULES = {
    "BM25Index": "bm25",
    "build_bm25": "bm25_build",
    "DenseIndex": "dense",
    "DenseSettings": "dense",
    "build_dense": "dense",
    "HttpRetriever": "remote",
}

__all__ = [
    "BM25Index",
    "DenseIndex",
    "DenseSettings",
    "HttpRetriever",
    "build_bm25",
    "build_dense",
    "open_retriever",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
