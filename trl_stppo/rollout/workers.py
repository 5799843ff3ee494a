"""Runs calls into environments on threads of their own, each under a time limit.

A thread that has ended its call waits for the next; none blocks the program's exit. Coroutines of all calls
run on one event loop, because a client, a lock or a limit that environments share belongs to one loop.

A call that exceeds its limit is abandoned: its later result is dropped. If a coroutine blocks the loop, all
calls on the loop exceed their limits, and later calls get a new loop.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

# Seconds for the event loop to answer after a call was abandoned, before it counts as blocked.
ANSWER_SECONDS = 0.5


@dataclass
class CallResult:
    """Result of one call into an environment. `value` and `error` are None if the call `timed_out`.

    `error` may be a SystemExit or its like.
    """

    key: int
    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Call:
    """One call into an environment, from its start to its result.

    Attributes:
        started: time from which its limit counts; infinite while a function waits for the poller.
        future: result of the work on the loop or the poller.
    """

    key: int
    func: Callable[[], Any]
    timeout: float
    started: float
    abandoned: bool = False
    future: Future[Any] | None = None


async def caught(make: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Make an awaitable and await it. Return its result and None, or None and the exception."""
    try:
        return await make(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # Return SystemExit too, because it would end the event loop.
        return None, error


class LazyLoop(asyncio.SelectorEventLoop):
    """An event loop that is built, with its three file descriptors, when it is first used."""

    def __init__(self) -> None:
        """Build nothing yet."""

    def __getattr__(self, name: str) -> Any:
        # Before the first use all attributes are missing.
        if "_ready" in vars(self):
            raise AttributeError(name)
        super().__init__()
        return getattr(self, name)

    def __del__(self) -> None:
        if vars(self):
            self.close()


class RolloutInterrupted(Exception):
    """Error that ends a rollout because the run ends."""


class EnvironmentCalls:
    """Runs calls on threads, and their coroutines on one event loop. One thread polls for results."""

    def __init__(self) -> None:
        # The lock of this condition guards all fields below. Results and functions to run wake the poller.
        self._change = threading.Condition()
        self._running: dict[int, Call] = {}
        self._finished: list[CallResult] = []
        # Queues of the threads that wait for a call.
        self._idle: list[SimpleQueue[Call | None]] = []
        self._interrupted = False
        self._current = threading.local()
        self._for_poller: deque[tuple[Callable[[], Any], Future[Any], Call]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop that synchronous code finds, by key, because an environment may keep objects of its loop.
        self._loops: dict[int, LazyLoop] = {}
        # The loop sets this event after an abandoned call, unless the loop is blocked.
        self._answers = threading.Event()
        self._answers.set()

    def submit(self, key: int, func: Callable[[], Any], timeout: float | None) -> None:
        """Start `func()` on a thread; a coroutine that it returns runs on the event loop.

        A key has one call at a time. `timeout`: seconds from the start of the call, None for no limit.
        """
        limit = math.inf if timeout is None else timeout
        with self._change:
            call = self._running[key] = Call(key, func, limit, time.monotonic())
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), name="environment", daemon=True).start()
        calls.put(call)

    def poll(self, wait: float = 0.0) -> list[CallResult]:
        """Return the results since the last poll, including abandoned calls.

        `wait`: seconds to block for the first result.
        """
        until = time.monotonic() + wait
        while True:
            if self._interrupted:
                raise RolloutInterrupted
            if self._run_for_worker():
                # The function may have taken long, so the poll does not block any more.
                until = time.monotonic()
            with self._change:
                self._abandon_overdue()
                left = until - time.monotonic()
                if self._finished or left <= 0:
                    results, self._finished = self._finished, []
                    return results
                if not (self._for_poller or self._interrupted):
                    ends = (call.started + call.timeout for call in self._running.values())
                    nearest = min(ends, default=until)
                    self._change.wait(max(0.0, min(left, nearest - time.monotonic())))

    def interrupt(self) -> None:
        """Make `poll` raise `RolloutInterrupted` from now on, even in a call that is blocked."""
        with self._change:
            self._interrupted = True
            self._change.notify_all()

    def resume(self) -> None:
        """End the effect of `interrupt`, so that `poll` returns results again."""
        self._interrupted = False

    def cancel(self, key: int) -> None:
        """Cancel the call of this key, so that it gives no result."""
        with self._change:
            if key in self._running:
                self._abandon(self._running[key])
            self._finished = [result for result in self._finished if result.key != key]

    def run_async(self, work: Awaitable[Any]) -> Any:
        """Await on the event loop, block this thread, and return the result.

        It is cancelled if its call is abandoned.
        """
        call: Call | None = getattr(self._current, "call", None)
        loop = self._loop
        if not self._answers.wait(ANSWER_SECONDS):
            self._drop_loop(loop)
        with self._change:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                arguments, name = (self._loop,), "environment-loop"
                threading.Thread(target=self._serve, args=arguments, name=name, daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(caught(lambda: work), self._loop)
            if call is not None:
                call.future = future
                if call.abandoned:
                    future.cancel()
        try:
            value, error = future.result()
        except CancelledError:
            # Without `close`, Python warns that the coroutine was never awaited.
            if isinstance(work, Coroutine) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise
        if error is not None:
            raise error
        return value

    def run_on_poller(self, func: Callable[[], Any]) -> Any:
        """Run `func()` on the polling thread, block the call's thread, and return the result.

        It is for functions that need the main thread. The time limit cannot end a function that runs there,
        and counts from its start there.
        """
        call: Call = self._current.call
        future: Future[Any] = Future()
        with self._change:
            self._for_poller.append((func, future, call))
            call.future, call.started = future, math.inf
            if call.abandoned:
                future.cancel()
            self._change.notify_all()
        return future.result()

    def _run_for_worker(self) -> bool:
        """Run the oldest function that `run_on_poller` has queued. Return whether there was one."""
        while self._for_poller:
            func, future, call = self._for_poller.popleft()
            if not future.set_running_or_notify_cancel():
                # The function's call was abandoned.
                continue
            call.started = time.monotonic()
            try:
                future.set_result(func())
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, KeyboardInterrupt):
                    raise
            return True
        return False

    def close(self) -> None:
        """Abandon all running calls, and release the threads and the event loop."""
        with self._change:
            for call in list(self._running.values()):
                self._abandon(call)
            self._loops.clear()
            while self._idle:
                self._idle.pop().put(None)
        self._drop_loop(self._loop)

    def _work(self, calls: SimpleQueue[Call | None]) -> None:
        while (call := calls.get()) is not None:
            result = self._result(call)
            with self._change:
                if call.abandoned:
                    return
                del self._running[call.key]
                self._finished.append(result)
                self._idle.append(calls)
                self._change.notify_all()
            # Keep no environment alive while the thread waits.
            del call, result

    def _result(self, call: Call) -> CallResult:
        result = CallResult(call.key)
        self._current.call = call
        asyncio.set_event_loop(self._loops.setdefault(call.key, LazyLoop()))
        try:
            result.value = call.func()
            if inspect.isawaitable(result.value):
                result.value = self.run_async(result.value)
        except BaseException as error:
            result.error = error
        result.seconds = time.monotonic() - call.started
        if result.seconds > call.timeout:
            # Otherwise the result would depend on when the poller looks.
            result.value, result.error, result.timed_out = None, None, True
        del self._current.call
        return result

    def _abandon_overdue(self) -> None:
        now = time.monotonic()
        for call in list(self._running.values()):
            if now >= call.started + call.timeout:
                self._abandon(call)
                late = CallResult(call.key, timed_out=True, seconds=now - call.started)
                self._finished.append(late)

    def _abandon(self, call: Call) -> None:
        call.abandoned = True
        self._loops.pop(call.key, None)
        del self._running[call.key]
        if call.future is not None:
            call.future.cancel()
        if self._loop is not None:
            self._answers = threading.Event()
            self._loop.call_soon_threadsafe(self._answers.set)

    def _drop_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Let running coroutines end on a loop; further calls get a new loop."""
        with self._change:
            if loop is not None and loop is self._loop:
                self._loop = None
                self._answers.set()
                asyncio.run_coroutine_threadsafe(_stop_when_idle(), loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            with self._change:
                # A task that an environment began ends the loop by SystemExit; further calls get a new loop.
                if loop is self._loop:
                    self._loop = None
                    self._answers.set()
                loop.close()


async def _stop_when_idle() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)
    asyncio.get_running_loop().stop()
