"""Retrievers by name, so that a configuration file can say which one; one per process and name."""

import os
import threading
from collections.abc import Callable

from trl_stppo.recipes.search.retrieval import BM25Retriever, Retriever

STDLIB = "stdlib"
_ALLOWED = '"http://HOST:PORT/retrieve", "bm25:FOLDER", "dense:FOLDER" or "stdlib"'

_opened: dict[str, Retriever] = {}
_locks: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def _forget_locks() -> None:
    """In a forked child: another thread of the parent may have held one, while opening an index."""
    global _lock
    _locks.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def open_retriever(name: str) -> Retriever:
    """The retriever of that name, opened once per process and shared by everyone who asks.

    Args:
        name: `"http://host:8000/retrieve"` (or https) for a server, `"bm25:FOLDER"` or
            `"dense:FOLDER"` for an index on this machine, `"stdlib"` for the documentation of
            Python's library.

    Raises:
        ValueError: a name of another form.
        IndexFolderError: the folder holds no complete index of that kind.
        ImportError: the package for that kind is not installed.
    """
    opener = _opener(name)
    with _lock:
        own = _locks.setdefault(name, threading.Lock())
    # One lock per name: opening a large index must not hold up who asks for another one.
    with own:
        if name not in _opened:
            _opened[name] = opener()
        return _opened[name]


def check_name(name: str) -> None:
    """Raise if the name has none of the allowed forms; nothing is opened."""
    _opener(name)


def _opener(name: str) -> Callable[[], Retriever]:
    kind, _, rest = name.partition(":")
    if name == STDLIB:
        return _open_stdlib
    if kind in ("http", "https") and rest.strip("/"):
        return lambda: _open_http(name)
    if kind in ("bm25", "dense") and rest:
        return lambda: _open_folder(kind, rest)
    raise ValueError(
        f"retriever is {name!r}; allowed are {_ALLOWED}, or an object with a method search. "
        "Write one of these forms."
    )


def _open_stdlib() -> Retriever:
    from trl_stppo.recipes.search.stdlib_docs import passages

    return BM25Retriever(passages())


def _open_http(url: str) -> Retriever:
    from .remote import HttpRetriever

    return HttpRetriever(url)


def _open_folder(kind: str, folder: str) -> Retriever:
    if kind == "bm25":
        from .bm25 import BM25Index

        return BM25Index(folder)
    from .dense import DenseIndex

    return DenseIndex(folder)
