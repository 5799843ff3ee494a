"""A bounded cache in which the same question is asked once, however many want to know."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any


class SharedCache:
    """Least recently used answers, and those on their way. Thread-safe."""

    def __init__(self, size: int) -> None:
        """Create it empty.

        Args:
            size: answers kept; 0 keeps none, but those on their way are still shared.
        """
        self._size = size
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._coming: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self.hits = 0

    def get(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """The answer to `key`: kept, on its way, or asked for now.

        Raises:
            BaseException: what `ask` raised, here or for whoever asked first; it is not kept.
        """
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                self.hits += 1
                return self._known[key]
            coming = self._coming.get(key)
            if coming is None:
                mine: Future[Any] = Future()
                self._coming[key] = mine
            else:
                self.hits += 1
        if coming is not None:
            return coming.result()
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
