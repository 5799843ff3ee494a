"""Open retrievers by name, as in configuration files. A process opens each name once."""

import os
import threading

from trl_stppo.recipes.search.retrieval import BM25Retriever, Retriever

STDLIB = "stdlib"
_ALLOWED = '"http://HOST:PORT/retrieve", "bm25:FOLDER", "dense:FOLDER" or "stdlib"'

_opened: dict[str, Retriever] = {}
_locks: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def _forget_locks() -> None:
    """Replace the locks in a forked child, because a thread of the parent may hold an old lock."""
    global _lock
    _locks.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def open_retriever(name: str) -> Retriever:
    """Return the retriever with the name `name`. A process opens each name once.

    Args:
        name: `"http://host:8000/retrieve"` (or https) for a server, `"bm25:FOLDER"` or
            `"dense:FOLDER"` for an index on this machine, `"stdlib"` for the documentation of
            Python's library.

    Raises:
        ValueError: a name of another form.
        IndexFolderError: the folder has no complete index of that kind.
    """
    check_name(name)
    with _lock:
        lock = _locks.setdefault(name, threading.Lock())
    # One lock per name: opening a large index must not block other names.
    with lock:
        if name not in _opened:
            _opened[name] = _open(name)
        return _opened[name]


def check_name(name: str) -> None:
    """Raise a ValueError if `name` has none of the allowed forms."""
    kind, _, rest = name.partition(":")
    is_address = kind in ("http", "https") and rest.strip("/")
    if not (name == STDLIB or is_address or (kind in ("bm25", "dense") and rest)):
        raise ValueError(f"retriever is {name!r}; allowed are {_ALLOWED}, or an object.")


def _open(name: str) -> Retriever:
    kind, _, rest = name.partition(":")
    if name == STDLIB:
        from trl_stppo.recipes.search.stdlib_docs import passages

        return BM25Retriever(passages())
    if kind == "bm25":
        from .bm25 import BM25Index

        return BM25Index(rest)
    if kind == "dense":
        from .dense import DenseIndex

        return DenseIndex(rest)
    from .remote import HttpRetriever

    return HttpRetriever(name)
