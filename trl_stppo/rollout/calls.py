"""A call into an environment, its result, and the time that counts towards its limit."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

# Seconds for a coroutine to react to its cancellation before it is abandoned.
CANCEL_SECONDS = 0.5


@dataclass
class CallResult:
    """Result of one call into an environment.

    Attributes:
        key: as submitted.
        value: the return value.
        error: the exception, SystemExit and the like included, or None.
        timed_out: whether the call was abandoned; value and error are None then.
        seconds: duration.
    """

    key: int
    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Call:
    """One call into an environment, from its submission to its result.

    Attributes:
        key, func, timeout: as submitted.
        started: None while the call is queued for a thread or for the poller.
        spent: seconds before the call was queued for the poller.
        abandoned: whether the call gives no result any more.
        asynchronous: whether `func` is a coroutine function.
        loop: the event loop on which it runs a coroutine.
        answered: set by the loop after the limit; a blocked loop does not set it.
        future: of what runs on the loop or the poller.
    """

    key: int
    func: Callable[[], Any]
    timeout: float | None
    started: float | None = None
    spent: float = 0.0
    abandoned: bool = False
    asynchronous: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    answered: threading.Event | None = None
    future: Future[Any] | None = None

    @property
    def ends_at(self) -> float:
        """The time at which the call must end or, once the loop was pinged, is abandoned."""
        if self.timeout is None or self.started is None:
            return math.inf
        return self.started + self.timeout + (CANCEL_SECONDS if self.answered is not None else 0.0)


async def caught(make: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Make an awaitable and await it. Return its result and None, or None and the exception."""
    try:
        return await make(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # SystemExit would end the event loop.
        return None, error
