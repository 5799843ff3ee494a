"""What the adapters share: reading an action, naming a missing package, private randomness."""

import contextlib
import random
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
# `random` and `numpy.random` are one per process: who swaps their state has to be alone.
_GLOBAL_GENERATORS = threading.RLock()


def action_text(text: str) -> str:
    """What the last `<action>..</action>` holds, or the whole text where there is none."""
    tagged = _TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


def last_word(text: str, words: Iterable[str]) -> str | None:
    """The last of `words` in the action, in lower case; None if there is none."""
    # Longer ones first: "go up" must not be read as "go".
    choices = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    found = re.findall(rf"\b(?:{choices})\b", action_text(text), re.IGNORECASE)
    return str(found[-1]).lower() if found else None


def missing(package: str, extra: str = "") -> ImportError:
    """The error for a package that is not installed; the extra is called as it is, unless it is given."""
    return ImportError(
        f"`{package}` is not installed, and this environment plays its games. Install it with "
        f"pip install 'trl-stppo[{extra or package}]'."
    )


def no_episode() -> RuntimeError:
    """The error for a step outside an episode."""
    return RuntimeError("no episode is running: call reset before step, and after an end.")


class PrivateRandomness:
    """The state of `random` and `numpy.random` that one environment alone sees.

    For packages that draw from, or reseed, the generators of the whole process. Their calls run
    inside `installed()`: the generators carry on from where this environment's last call left them,
    and everyone else finds them as they were. Calls of several threads follow one another; a thread
    that draws from the same generators without this lock may still see the wrong state.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None  # None: unseeded so far

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the private state in place for the length of a `with` block."""
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
