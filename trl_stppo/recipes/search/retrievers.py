"""Open retrievers by name, as in configuration files."""

import threading
from functools import cache
from typing import Any

from trl_stppo.recipes.search.retrieval import BM25Retriever, Retriever

__all__ = ["open_retriever"]

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
        from trl_stppo.recipes.search.stdlib_docs import passages

        return BM25Retriever(passages())
    from trl_stppo.recipes.search.remote import HttpRetriever

    return HttpRetriever(name)
