r"""Searching through a server that speaks Search-R1's form (arXiv:2503.09516).

POST {"queries": ["..."], "topk": 3, "return_scores": true}
->   {"result": [[{"document": {"contents": "\"Title\"\ntext"}, "score": 1.5}, ...]]}
"""

import json
import random
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from trl_stppo.errors import RetrievalError
from trl_stppo.recipes.search.retrieval import Passage, check_top_k

from .cache import SharedCache
from .corpus import passage_of
from .deadline_http import FAILURES, Poster
from .forks import in_every_child

_WORTH_A_RETRY = frozenset({408, 429})  # "too slow" and "too many requests", unlike other 4xx


@dataclass(frozen=True)
class HttpSettings:
    """How patient to be with the server.

    Attributes:
        timeout: seconds for one attempt, from connecting to the last byte, > 0.
        deadline: seconds for a search with all its attempts and pauses, >= timeout.
        retries: attempts after the first, >= 0.
        backoff: seconds before the first retry, doubled for each further one, >= 0; drawn from the
            upper half of that, so that many clients do not come back at once.
        max_backoff: seconds of a pause at most.
        cache_size: answers kept in memory, >= 0.
    """

    timeout: float = 10.0
    deadline: float = 60.0
    retries: int = 6
    backoff: float = 0.25
    max_backoff: float = 5.0
    cache_size: int = 10_000

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name in ("backoff", "max_backoff", "retries", "cache_size"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 0. Raise it."
                )
        if not 0 < self.timeout <= self.deadline:
            raise ValueError(
                f"timeout is {self.timeout} and deadline {self.deadline}; needed is "
                "0 < timeout <= deadline. Raise the deadline."
            )


class HttpRetriever:
    """Asks a server; equal questions are asked once. Thread-safe.

    Environments time out by the rollout's `env_timeout_seconds`: keep `deadline` below it.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        """Create a client; nothing is connected until the first search.

        Args:
            url: of the endpoint, "http://127.0.0.1:8000/retrieve". Proxies are not used.
            **settings: fields of `HttpSettings`.

        Raises:
            ValueError: a URL or a setting that is not allowed.
        """
        self.url, self.settings = url, HttpSettings(**settings)
        self._poster = Poster(url)
        self._cache = SharedCache(self.settings.cache_size)
        # Not the process's generator, on which the run's reproducibility rests.
        self._random = random.Random()
        self.requests = self.retried = 0
        self._start()
        in_every_child(self._start)

    def _start(self) -> None:
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.url, asdict(self.settings))

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
        if not query.strip():
            return []
        return list(self._cache.get((query, top_k), lambda: self._retrying(query, top_k)))

    def _retrying(self, query: str, top_k: int) -> tuple[Passage, ...]:
        settings, end = self.settings, time.monotonic() + self.settings.deadline
        asked = {"queries": [query], "topk": top_k, "return_scores": True}
        body = json.dumps(asked).encode()
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._attempt(body, top_k, end - time.monotonic())
            except _RETRIED as error:
                failure = _root(error)
            pause = min(settings.max_backoff, settings.backoff * 2 ** (attempt - 1))
            with self._lock:
                pause *= self._random.uniform(0.5, 1.0)
                more = attempt <= settings.retries and time.monotonic() + pause < end
                self.retried += more
            if not more:
                raise RetrievalError(
                    f"{self.url} gave no answer in {attempt} attempts ({settings.retries + 1} "
                    f"allowed, {settings.deadline:g} s in all). The last failure: "
                    f"{type(failure).__name__}: {failure}. Is the server up? See its log, or raise "
                    "timeout, deadline or retries."
                ) from failure
            time.sleep(pause)

    def _attempt(self, body: bytes, top_k: int, left: float) -> tuple[Passage, ...]:
        with self._lock:
            self.requests += 1
        status, answer = self._poster.post(body, min(self.settings.timeout, left))
        if status == 200:
            return _passages(answer)[:top_k]
        shown = answer[:200].decode("utf-8", "replace")
        if status >= 500 or status in _WORTH_A_RETRY:
            raise _ServerFailure(f"status {status}: {shown}")
        raise RetrievalError(
            f"{self.url} refused a request with status {status}: {shown!r}. Needed is a server of "
            "Search-R1's form (docs/recipes.md). Check the path of the URL and the server."
        )


class _ServerFailure(Exception):
    """An answer that says, or shows, that the server failed."""


_RETRIED = (*FAILURES, _ServerFailure)


def _root(error: BaseException) -> BaseException:
    """The system's error behind httpx's, which only says that connecting failed; else the error."""
    root, behind = error, None if isinstance(error, OSError) else error
    while behind is not None:
        root = behind if isinstance(behind, OSError) else root
        behind = behind.__cause__ or behind.__context__
    return root


def _passages(answer: bytes) -> tuple[Passage, ...]:
    """The passages found for the one query; documents come with scores or without."""
    try:
        (found,) = json.loads(answer)["result"]
        return tuple(
            passage_of(hit["document"] if isinstance(hit, dict) and "document" in hit else hit)
            for hit in found
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        shown = answer[:200].decode("utf-8", "replace")
        raise _ServerFailure(
            f"unreadable answer {shown!r} ({type(error).__name__}: {error})"
        ) from None


def _make(url: str, settings: dict[str, Any]) -> HttpRetriever:
    return HttpRetriever(url, **settings)
