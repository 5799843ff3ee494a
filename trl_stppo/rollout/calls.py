"""A call into an environment, its result, and the time that counts towards its limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .shared_loop import SharedLoop

# Seconds for a coroutine to react to its cancellation before it is abandoned.
CANCEL_SECONDS = 0.5


@dataclass
class CallResult:
    """Result of one call into an environment."""

    key: int  # as submitted
    value: Any = None  # the return value
    error: BaseException | None = None  # the exception, SystemExit and the like included, or None
    timed_out: bool = False  # whether it was abandoned; value and error are None then
    # The call that blocked the event loop when this one was abandoned: "itself", "another" or None.
    blocked: str | None = None
    seconds: float = 0.0  # duration


@dataclass(eq=False)
class Call:
    """One call into an environment, from its submission to its result."""

    key: int
    func: Callable[[], Any]
    timeout: float | None
    started: float | None = None  # None while it is queued for worker, event loop or poller
    spent: float = 0.0  # seconds before it was queued for the poller
    abandoned: bool = False
    asynchronous: bool = False
    loop: SharedLoop | None = None
    limit: asyncio.Timeout | None = None  # on the loop
    future: Future[Any] | None = None

    def overdue_at(self, now: float) -> float | None:
        """Return the time at which the call will be abandoned, judged at `now`. None means never."""
        if self.timeout is None or self.started is None:
            return None
        at = self.started + self.timeout + (CANCEL_SECONDS if self.asynchronous else 0.0)
        blocked = None if self.loop is None else self.loop.blocked_for(now)
        if blocked is None or blocked[0] is self:
            return at
        # A block that never ends extends the limits of other calls by at most one limit.
        return at + min(now - max(blocked[1], self.started), self.timeout)

    def blocked_by(self, now: float) -> str | None:
        """Return whether the call "itself" or "another" call blocks the call's event loop, or None."""
        blocked = None if self.loop is None else self.loop.blocked_for(now)
        return None if blocked is None else "itself" if blocked[0] is self else "another"

    def postpone(self, seconds: float) -> None:
        """Extend the time limit by the time for which another call blocked the event loop."""
        # On the loop's thread.
        if self.started is None:
            return
        seconds = min(seconds, time.monotonic() - self.started)
        self.started += seconds
        if self.limit is not None and not self.limit.expired():
            at = self.limit.when()
            self.limit.reschedule(None if at is None else at + seconds)


@dataclass(eq=False)
class Job:
    """A coroutine that is queued for the event loop, or runs there."""

    make: Callable[[], Coroutine[Any, Any, Any]]
    call: Call | None
    loop: SharedLoop = field(init=False)
    future: Future[Any] = field(init=False)


async def caught(make: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Make an awaitable and await it. Return its result and None, or None and the exception."""
    try:
        return await make(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the event loop
        return None, error
