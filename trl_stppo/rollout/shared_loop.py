"""The event loop that asynchronous environments share. It detects which call blocks the loop.

They share one loop because a client, a lock or a limit that all instances use belongs to one loop. So a
call that blocks, such as `time.sleep` in a coroutine, delays all of them.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from ..threads import DaemonThread

# Tasks that yield or end within this time, in seconds, do not count as blocking.
BLOCKING = 0.1
# The owner of a task; the tasks that it starts inherit it.
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)


def delegate_blocks(owner: Any) -> Any:
    """Attribute blocks by this context's tasks to `owner.owner`. Return the previous owner.

    `owner` None changes nothing.
    """
    present = _OWNER.get()
    if owner is not None:
        owner.owner = present
        _OWNER.set(owner)
    return present


class SharedLoop:
    """An event loop on a separate daemon thread. It detects tasks that block the loop.

    `blocked` is called on the loop's thread, as soon as a block is over, with loop, owner and seconds.
    """

    def __init__(self, blocked: Callable[[SharedLoop, Any, float], None]) -> None:
        self._blocked = blocked
        self._holder: tuple[Any, float] | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        DaemonThread(self._run, "environment-loop").start()

    def start(self, coroutine: Coroutine[Any, Any, Any], owner: Any) -> Future[Any]:
        """Start a coroutine for an owner, and return its future. Any thread may call this.

        `asyncio.run_coroutine_threadsafe` would pass the result on in the loop's next cycle, which a
        block may delay.
        """
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        context.run(_OWNER.set, owner)
        context.run(self._loop.call_soon_threadsafe, self._begin, coroutine, future)
        return future

    def _begin(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        task = self._loop.create_task(_run_into(coroutine, future))

        def cancel(future: Future[Any]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(cancel)

    def ping(self) -> threading.Event:
        """Return an event that the loop sets in its next cycle."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered

    def blocked_for(self, now: float) -> tuple[Any, float] | None:
        """Return the owner that blocks the loop and the block's start (`time.monotonic`), or None."""
        holder = self._holder
        return holder if holder is not None and now - holder[1] >= BLOCKING else None

    def stop_when_idle(self) -> None:
        """Stop the loop and its thread as soon as all its tasks have ended."""
        asyncio.run_coroutine_threadsafe(_stop_when_idle(), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Watched(coroutine, self), loop=loop, **options)

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a task to its next yield, and report a long run as a block of the loop."""
        owner = _OWNER.get()
        self._holder = getattr(owner, "owner", owner), time.monotonic()
        try:
            return step(*arguments)
        finally:
            (owner, since), self._holder = self._holder, None
            took = time.monotonic() - since
            if took >= BLOCKING:
                self._blocked(self, owner, took)


class _Watched(Coroutine[Any, Any, Any]):
    """Wrapper of a coroutine, which runs each step of the coroutine by `SharedLoop.run`."""

    def __init__(self, coroutine: Any, loop: SharedLoop) -> None:
        self._coroutine, self._loop = coroutine, loop

    def send(self, value: Any) -> Any:
        """Run the coroutine to its next yield."""
        return self._loop.run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception at the coroutine's current yield, and run it to the next yield."""
        return self._loop.run(self._coroutine.throw, *error)

    def close(self) -> None:
        """Close the wrapped coroutine."""
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:  # frames and names, for displays of tasks
        return getattr(self._coroutine, name)


async def _run_into(coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
    """Run a coroutine and set its result on the future at once, unless the future is cancelled."""
    try:
        value = await coroutine
    except asyncio.CancelledError:
        future.cancel()
        raise
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


async def _stop_when_idle() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
