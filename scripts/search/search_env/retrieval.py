"""Retrievers by name, their interface, a client of a server, BM25 in memory (bm25s), and a corpus for it."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trl_stppo.errors import MissingPackageError

# huggingface_hub depends on one of the two: on httpx2 from its version 2 on, on httpx before.
try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

__all__ = ["open_retriever"]

# Retry "timeout" and "too many requests", unlike other 4xx errors.
_RETRIED = frozenset({408, 429})
_HEADERS = {"Content-Type": "application/json"}
# Use a separate generator, because a reproducible run draws from the global generator.
_random = random.Random()


class RetrievalError(RuntimeError):
    """A search that failed on a retrieval server."""


class HttpRetriever:
    """A client of a retrieval server, with a cache. Thread-safe, also in a forked process.

    The rollout's `env_timeout_seconds` limits a search with all its attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        retries: int = 6,
        backoff: float = 0.25,
        cache_size: int = 10_000,
    ) -> None:
        """Create a client. The client connects on the first search.

        Args:
            url: address of the endpoint, "http://127.0.0.1:8000/retrieve". Proxies are not used.
            timeout: seconds to connect, and between two parts of a response, > 0.
            retries: attempts after the first, >= 0.
            backoff: seconds before the first retry, >= 0, doubled for each further retry up to 5 s. The pause
                is drawn between half and all of it, so that clients do not retry at the same time.
            cache_size: responses in memory, >= 0.
        """
        self._settings: dict[str, Any] = {"timeout": timeout, "retries": retries}
        self._settings |= {"backoff": backoff, "cache_size": cache_size}
        for name, value in self._settings.items():
            if value < 0 or timeout == 0:
                raise ValueError(f"{name} is {value}; allowed: timeout > 0, the others >= 0.")
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url cannot be read: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
            raise ValueError("url must have http or https and a host, and no user or password.")
        self.url = url
        self._found = lru_cache(cache_size)(self._ask)
        self._connect()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(HttpRetriever, self.url, **self._settings), ()

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages. A blank query is not sent and finds nothing.

        Raises:
            RetrievalError: the server rejected the request, or failed until the last retry.
        """
        return list(self._found(query, top_k)) if query.strip() else []

    def _connect(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(
            timeout=self._settings["timeout"], limits=limits, trust_env=False, headers=_HEADERS
        )
        self._process = os.getpid()

    def _ask(self, query: str, top_k: int) -> tuple[Passage, ...]:
        # A forked process must not use its parent's connections.
        if self._process != os.getpid():
            self._connect()
        request = json.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        pause = self._settings["backoff"]
        for attempt in range(self._settings["retries"] + 1):
            if attempt:
                time.sleep(_random.uniform(0.5, 1.0) * min(pause, 5.0))
                pause *= 2
            try:
                answer = self._client.post(self.url, content=request)
                if answer.status_code == 200:
                    (found,) = answer.json()["result"]
                    return tuple(map(passage_of, found))[:top_k]
                failure = f"status {answer.status_code}: {answer.text[:200]!r}"
                if answer.status_code < 500 and answer.status_code not in _RETRIED:
                    raise RetrievalError(
                        f"{self.url} rejected a request with {failure}; must be of Search-R1's form."
                    )
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                failure = f"unreadable answer ({type(error).__name__}: {error})"
        raise RetrievalError(f"{self.url} failed {attempt + 1} times. The last failure: {failure}.")


def passage_of(record: object) -> Passage:
    """Parse a record of a corpus file, or of a server's response, into a passage.

    A record has `contents`, whose first line is the title (usually in quotes), or `text` and perhaps `title`.
    A server may put it in `document`, beside a score.
    """
    record = record.get("document", record) if isinstance(record, dict) else record
    if isinstance(record, dict):
        contents, text, title = (record.get(key) for key in ("contents", "text", "title"))
        if isinstance(contents, str):
            first, newline, rest = contents.partition("\n")
            return Passage(_unquoted(first), rest) if newline else Passage("", contents)
        if isinstance(text, str) and isinstance(title, str | None):
            return Passage(_unquoted(title or ""), text)
    raise ValueError(
        f"a passage is {record!r:.120}; must have the string `contents`, or `text` and perhaps `title`."
    )


def _unquoted(title: str) -> str:
    title = title.strip()
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return title[1:-1] if quoted else title


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


def stdlib_search_dataset(split: Split) -> datasets.Dataset:
    """Return a split's rows, with prompt (one user message), answers, hops (1 or 2), kind and name.

    No name is in both splits.
    """
    import datasets

    return datasets.Dataset.from_list(_lines(split))


STDLIB = "stdlib"
# Lock the call: with `cache` alone, two threads could both open the same retriever.
_lock = threading.Lock()


def open_retriever(name: str) -> Retriever:
    """Return the retriever with the name `name`. A process opens each name once.

    Names are `"http://host:8000/retrieve"` (or https) for a server, and `"stdlib"` for the documentation of
    Python's library. Others raise ValueError.
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
    return BM25Retriever(passages()) if name == STDLIB else HttpRetriever(name)


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
        """Return at most `top_k` (>= 1) passages, best first; an empty list if nothing matches."""
        ...


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

    It is made for the documentation of programs (see `words`). `scripts/search/` has an index on disk, for
    text of any language.
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
        """Return at most `top_k` passages, best first, ties in corpus order. A blank query finds nothing."""
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the passages of `search`, each with its score."""
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
        raise MissingPackageError("bm25s", "search") from error
    return bm25s
