r"""Search through a retrieval server with Search-R1's request format (arXiv:2503.09516).

POST {"queries": ["..."], "topk": 3, "return_scores": true}
->   {"result": [[{"document": {"contents": "\"Title\"\ntext"}, "score": 1.5}, ...]]}
"""

import json
import os
import random
import time
from functools import lru_cache
from typing import Any

from trl_stppo.errors import RetrievalError
from trl_stppo.recipes.search.retrieval import Passage, check_top_k

# huggingface_hub depends on one of the two, on the first from its version 2 on.
try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

# "timeout" and "too many requests", unlike other 4xx
_RETRIED = frozenset({408, 429})
_HEADERS = {"Content-Type": "application/json"}
# Not the global generator, which a reproducible run draws from.
_random = random.Random()


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
            url: of the endpoint, "http://127.0.0.1:8000/retrieve". Proxies are not used.
            timeout: seconds to connect, and between two parts of a response, > 0.
            retries: attempts after the first, >= 0.
            backoff: seconds before the first retry, >= 0, doubled for each further one up to 5 s; drawn
                from the upper half of that, so that clients do not retry at once.
            cache_size: responses in memory, >= 0.
        """
        self._settings = {"timeout": timeout, "retries": retries, "backoff": backoff}
        for name, value in {**self._settings, "cache_size": cache_size}.items():
            if value < 0 or timeout == 0:
                raise ValueError(f"{name} is {value}; allowed: timeout > 0, the others >= 0.")
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url cannot be read: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
            raise ValueError("url must have http or https and a host, and no user or password.")
        self.url, self._cache_size = url, cache_size
        self._found = lru_cache(cache_size)(self._ask)
        self._connect()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.url, {**self._settings, "cache_size": self._cache_size})

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return at most `top_k` passages. A blank query is not sent and finds none.

        Raises:
            RetrievalError: the server rejected the request, or failed until the last retry.
        """
        check_top_k(top_k)
        return list(self._found(query, top_k)) if query.strip() else []

    def _connect(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(
            timeout=self._settings["timeout"], limits=limits, trust_env=False, headers=_HEADERS
        )
        self._process = os.getpid()

    def _ask(self, query: str, top_k: int) -> tuple[Passage, ...]:
        # A fork must not use its parent's connections.
        if self._process != os.getpid():
            self._connect()
        request = json.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        pause = self._settings["backoff"]
        for attempt in range(int(self._settings["retries"]) + 1):
            if attempt:
                time.sleep(_random.uniform(0.5, 1.0) * min(pause, 5.0))
                pause *= 2
            try:
                answer = self._client.post(self.url, content=request)
                if answer.status_code == 200:
                    (found,) = answer.json()["result"]
                    return tuple(map(_passage, found))[:top_k]
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

    It has `contents`, whose first line is the title (usually in quotes), or `text` and perhaps `title`.
    """
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


def _passage(hit: Any) -> Passage:
    """Parse a search result of the server, with or without a score, into a passage."""
    return passage_of(hit["document"] if isinstance(hit, dict) and "document" in hit else hit)


def _make(url: str, settings: dict[str, Any]) -> HttpRetriever:
    return HttpRetriever(url, **settings)


def _unquoted(title: str) -> str:
    title = title.strip()
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return title[1:-1] if quoted else title
