"""Helpers of the adapters: parsing an action, errors, private randomness."""

import contextlib
import random
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
# Lock around swaps of the states of `random` and `numpy.random`, which all threads of a process share.
_GLOBAL_GENERATORS = threading.RLock()


def action_text(text: str) -> str:
    """Return the text in the last `<action>..</action>`, or the whole text if there is no such tag."""
    tagged = _TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


def last_word(text: str, words: Iterable[str]) -> str | None:
    """Return the last of `words` that occurs in the action, in any case, or None if none occurs."""
    known = {word.casefold(): word for word in words}
    # Try longer words first, so that "go up" is not read as "go".
    choices = "|".join(re.escape(word) for word in sorted(known, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{choices})(?!\w)", action_text(text).casefold())
    return known[found[-1]] if found else None


def no_episode() -> RuntimeError:
    """Return the error for a call of `step` while no episode is running."""
    return RuntimeError("no episode is running: call reset before step, and after an end.")


class PrivateRandomness:
    """Private state of the generators `random` and `numpy.random`, for one environment.

    It is for packages that draw from, or reseed, the global generators. Their calls run inside
    `installed()`, one thread at a time: the generators continue from this environment's last call, and
    are restored afterwards. A thread that draws without this lock may still see the wrong state.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which the global generators have this environment's private state."""
        import numpy as np

        with _GLOBAL_GENERATORS:
            outside = random.getstate(), np.random.get_state()
            if self._states is None:
                random.seed()
                np.random.seed()
            else:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
