"""A bounded cache in which the same question is asked once, however many want to know."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from trl_stppo.errors import RetrievalError

from .forks import in_every_child


class SharedCache:
    """Least recently used answers, and those on their way. Thread-safe."""

    def __init__(self, size: int) -> None:
        """Create it empty.

        Args:
            size: answers kept; 0 keeps none, but those on their way are still shared.
        """
        self._size = size
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._start()
        in_every_child(self._start)

    def _start(self) -> None:
        self._coming: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """The answer to `key`: kept, on its way, or asked for now.

        Raises:
            BaseException: what `ask` raised; it is not kept.
            RetrievalError: it raised for another thread, whose answer this one waited for.
        """
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            coming = self._coming.get(key)
            if coming is None:
                mine: Future[Any] = Future()
                self._coming[key] = mine
        if coming is not None:
            return _awaited(coming)
        try:
            answer = ask()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._coming[key]
            self._known[key] = answer
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        mine.set_result(answer)
        return answer


def _awaited(coming: Future[Any]) -> Any:
    """The answer that another thread gets; for its failure an error of one's own.

    Raising writes a traceback into the error, so that one object in many threads would collect those
    of all of them.
    """
    error = coming.exception()
    if error is None:
        return coming.result()
    if isinstance(error, RetrievalError):
        raise RetrievalError(*error.args) from error
    raise RetrievalError(
        "the same question, asked by another thread, failed with "
        f"{type(error).__name__}: {error}. Ask again."
    ) from error
