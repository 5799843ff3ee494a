r"""Searching through a server that speaks Search-R1's form (arXiv:2503.09516).

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

from .corpus import passage_of

try:  # what huggingface_hub brings: the former from its version 2 on
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

_WORTH_A_RETRY = frozenset({408, 429})  # "too slow" and "too many requests", unlike other 4xx
_HEADERS = {"Content-Type": "application/json"}
# Not the process's generator, on which the run's reproducibility rests.
_random = random.Random()


class HttpRetriever:
    """Asks a server, and remembers its answers. Thread-safe, also in a forked process.

    The rollout's `env_timeout_seconds` bounds a search with all its attempts.
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
        """Create a client; nothing is connected until the first search.

        Args:
            url: of the endpoint, "http://127.0.0.1:8000/retrieve". Proxies are not used.
            timeout: seconds to connect, and between two parts of an answer, > 0.
            retries: attempts after the first, >= 0.
            backoff: seconds before the first retry, doubled for each further one up to 5 s, >= 0; drawn
                from the upper half of that, so that many clients do not come back at once.
            cache_size: answers kept in memory, >= 0.

        Raises:
            ValueError: a URL or a setting that is not allowed.
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
            raise ValueError("url needs http or https and a host, and takes no user or password.")
        self.url, self._cache_size = url, cache_size
        self._found = lru_cache(cache_size)(self._ask)
        self._connect()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.url, {**self._settings, "cache_size": self._cache_size})

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return what the server finds, at most `top_k` passages.

        Args:
            query: free text; a blank one finds nothing, and is not sent.
            top_k: how many passages at most, >= 1.

        Raises:
            ValueError: `top_k` is smaller than 1.
            RetrievalError: the server refused the request, or failed until the last retry.
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
        if self._process != os.getpid():  # the connections so far are a parent's
            self._connect()
        asked = {"queries": [query], "topk": top_k, "return_scores": True}
        request: dict[str, Any] = {"content": json.dumps(asked)}
        pause = self._settings["backoff"]
        for attempt in range(int(self._settings["retries"]) + 1):
            if attempt:
                time.sleep(_random.uniform(0.5, 1.0) * min(pause, 5.0))
                pause *= 2
            try:
                answer = self._client.post(self.url, **request)
                if answer.status_code == 200:
                    (found,) = answer.json()["result"]
                    return tuple(map(_passage, found))[:top_k]
                failure = f"status {answer.status_code}: {answer.text[:200]!r}"
                if answer.status_code < 500 and answer.status_code not in _WORTH_A_RETRY:
                    raise RetrievalError(
                        f"{self.url} refused a request with {failure}. Needed is a server of "
                        f"Search-R1's form (docs/recipes.md)."
                    )
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                failure = f"unreadable answer ({type(error).__name__}: {error})"
        raise RetrievalError(
            f"{self.url} gave no answer in {attempt + 1} attempts. The last failure: {failure}. Is the "
            f"server up?"
        )


def _passage(hit: Any) -> Passage:
    """Documents come with scores or without."""
    return passage_of(hit["document"] if isinstance(hit, dict) and "document" in hit else hit)


def _make(url: str, settings: dict[str, Any]) -> HttpRetriever:
    return HttpRetriever(url, **settings)
