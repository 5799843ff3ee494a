"""Runs calls into environments off the main thread, each under a time limit.

Synchronous calls run on daemon threads that start as needed and end when idle; asynchronous calls
run on one event loop. A call that exceeds its limit is abandoned: its thread is replaced, its later
result is discarded, and the program's exit does not block on it. If such a call blocks the loop, the
loop is replaced too; jobs that have not begun move to the new one. Time for which another call blocks the
loop does not count.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from ..errors import ThreadStartError
from ..threads import DaemonThread
from .calls import CANCEL_SECONDS, Call, CallResult, Job, caught
from .shared_loop import SharedLoop

# Seconds that a thread without work stays: turns follow each other quickly.
IDLE_SECONDS = 2.0


class RolloutInterrupted(Exception):
    """Error that ends a rollout on another thread because the run ends."""


class EnvironmentCalls:
    """Runs synchronous calls on a thread each, others on an event loop. One thread polls for the results."""

    def __init__(self) -> None:
        lock = threading.RLock()  # guards everything below
        self._change = threading.Condition(lock)  # a result, or a new deadline to watch
        self._work = threading.Condition(lock)
        self._waiting: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        self._finished: deque[CallResult] = deque()
        self._live = 0
        self._resting = self._interrupted = False
        self._current = threading.local()
        self._for_poller: deque[tuple[Callable[[], Any], Future[Any], Call | None]] = deque()
        self._loop: SharedLoop | None = None
        self._jobs: list[Job] = []  # jobs that have not begun
        # Loops that may be blocked, the deadline of their answer, and the event of that answer.
        self._doubted: list[tuple[SharedLoop, float, threading.Event]] = []

    def submit(self, key: int, func: Callable[[], Any], timeout: float | None) -> None:
        """Start `func()` on a worker thread. A coroutine function runs on the event loop.

        One call per key at a time. `timeout`: seconds from the moment it starts, None for no limit.
        """
        call = Call(key, func, timeout, asynchronous=inspect.iscoroutinefunction(func))
        with self._change:
            if call.asynchronous:
                self._running[key] = call
                self._start(lambda: self._run_async(call), call)
            else:
                self._resting = False
                self._waiting.append(call)
                self._staff()

    def poll(self, wait: float = 0.0) -> list[CallResult]:
        """Return the results since the last poll, including abandoned calls.

        `wait`: seconds to block for the first one.
        """
        until = time.monotonic() + wait
        while True:
            if self._interrupted:
                raise RolloutInterrupted
            if self._run_for_worker():
                until = time.monotonic()  # return at once: the caller may have limits
            with self._change:
                self._abandon_overdue()
                left = until - time.monotonic()
                if self._finished or left <= 0:
                    results = list(self._finished)
                    self._finished.clear()
                    return results
                if not self._for_poller:
                    self._change.wait(min(left, *self._seconds_to_deadlines(), left))

    def interrupt(self) -> None:
        """Make `poll` raise `RolloutInterrupted` from now on, even in a call that is blocked."""
        with self._change:
            self._interrupted = True
            self._change.notify_all()

    def resume(self) -> None:
        """End the effect of `interrupt`, so that `poll` returns results again."""
        self._interrupted = False

    def cancel(self, key: int) -> None:
        """Cancel the call of this key. It gives no result."""
        with self._change:
            self._waiting = deque(call for call in self._waiting if call.key != key)
            if key in self._running:
                self._abandon(self._running[key])
            self._finished = deque(result for result in self._finished if result.key != key)

    def run_async(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop, block this worker thread, and return the result.

        It is cancelled if its call is abandoned.
        """
        call: Call | None = getattr(self._current, "call", None)
        with self._change:
            job = self._start(lambda: caught(lambda: coroutine), call)
            if call is not None and call.abandoned:
                job.future.cancel()
        while True:
            future = job.future
            try:
                value, error = future.result()
                break
            except CancelledError:
                if job.future is not future:
                    continue  # it has moved to another loop
                if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    coroutine.close()  # else Python warns that it was never awaited
                raise
        if call is not None:
            call.loop = None
        if error is not None:
            raise error
        return value

    def run_on_poller(self, func: Callable[[], Any]) -> Any:
        """Run `func()` on the polling thread, block this worker thread, and return the result.

        It is for functions that need the main thread. Once it runs there, its time limit cannot end it;
        while it is queued, the limit's clock stands still.
        """
        call: Call | None = getattr(self._current, "call", None)
        future: Future[Any] = Future()
        with self._change:
            self._for_poller.append((func, future, call))
            if call is not None:
                call.future = future
                if call.started is not None:
                    call.spent, call.started = time.monotonic() - call.started, None
                if call.abandoned:
                    future.cancel()
            self._change.notify_all()
        return future.result()

    def _run_for_worker(self) -> bool:
        """Run the oldest function that `run_on_poller` has queued. Return whether there was one."""
        while self._for_poller:
            func, future, call = self._for_poller.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # its call was abandoned
            if call is not None:
                call.started = time.monotonic() - call.spent
            try:
                future.set_result(func())
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, KeyboardInterrupt):
                    raise
            return True
        return False

    def rest(self) -> None:
        """End idle worker threads between rollouts."""
        with self._change:
            self._resting = True
            self._work.notify_all()

    def close(self) -> None:
        """Abandon all running calls, and release the threads and the event loop."""
        with self._change:
            self._waiting.clear()
            for call in list(self._running.values()):
                self._abandon(call)
        self.rest()
        self._drop_loop()

    # ------------------------------------------------------------------ threads

    def _staff(self) -> None:
        busy = sum(not call.asynchronous for call in self._running.values())
        while self._live - busy < len(self._waiting):
            try:
                DaemonThread(self._worker, "environment").start()
            except ThreadStartError:
                self._waiting.clear()  # which ends; what lets go of it is to start no more threads
                raise
            self._live += 1
        self._work.notify(len(self._waiting))

    def _worker(self) -> None:
        while (call := self._next_call()) is not None:
            result = CallResult(call.key)
            self._current.call = call
            try:
                result.value = call.func()
            except BaseException as error:
                result.error = error
            if call.started is not None:  # None: abandoned in the poller's queue
                result.seconds = time.monotonic() - call.started
            if call.timeout is not None and result.seconds > call.timeout:
                # Overdue even if no poll came in the meantime: the result must not depend on it.
                result.value, result.error, result.timed_out = None, None, True
            if not self._finish(call, result):
                return  # this thread has been replaced
            del call, result, self._current.call

    def _next_call(self) -> Call | None:
        with self._change:
            while not self._waiting:
                woken = not self._resting and self._work.wait(IDLE_SECONDS)
                if not self._waiting and (self._resting or not woken):
                    self._live -= 1
                    return None
            call = self._waiting.popleft()
            call.started = time.monotonic()
            self._running[call.key] = call
            self._change.notify_all()  # there is a new deadline to watch
            return call

    def _finish(self, call: Call, result: CallResult) -> bool:
        with self._change:
            if call.abandoned:
                return False
            del self._running[call.key]
            self._finished.append(result)
            self._change.notify_all()
            return True

    # ---------------------------------------------------------------- deadlines

    def _seconds_to_deadlines(self) -> list[float]:
        now = time.monotonic()
        times = [call.overdue_at(now) for call in self._running.values()]
        # A lower bound, so that a block that postpones deadlines does not cause a busy loop.
        return [max(0.01, at - now) for at in times if at is not None]

    def _drop_blocked_loops(self) -> None:
        now = time.monotonic()
        due = [doubt for doubt in self._doubted if now >= doubt[1] or doubt[2].is_set()]
        self._doubted = [doubt for doubt in self._doubted if doubt not in due]
        for loop, _, answered in due:
            if loop is self._loop and not answered.is_set():
                self._replace_loop()

    def _abandon_overdue(self) -> None:
        self._drop_blocked_loops()
        now = time.monotonic()
        for call in list(self._running.values()):
            at = call.overdue_at(now)
            if at is not None and now >= at:
                assert call.started is not None
                by, seconds = call.blocked_by(now), now - call.started
                self._abandon(call)
                late = CallResult(call.key, timed_out=True, blocked=by, seconds=seconds)
                self._finished.append(late)

    def _abandon(self, call: Call) -> None:
        call.abandoned = True
        del self._running[call.key]
        self._jobs = [job for job in self._jobs if job.call is not call]
        if call.future is not None:
            call.future.cancel()
        if not call.asynchronous:
            self._live -= 1
            self._staff()
        if call.loop is not None and call.loop is self._loop:
            blocked = call.loop.blocked_for(time.monotonic())
            if blocked is not None and blocked[0] is call:
                self._replace_loop()
            elif blocked is None or blocked[0] not in self._running.values():
                # The blocker may not be a task, and a task that has just begun gets time to end.
                until = time.monotonic() + CANCEL_SECONDS
                self._doubted.append((call.loop, until, call.loop.ping()))

    # --------------------------------------------------------------- event loop

    def _start(self, make: Callable[[], Coroutine[Any, Any, Any]], call: Call | None) -> Job:
        self._drop_blocked_loops()
        job = Job(make, call)
        self._jobs.append(job)
        self._put_on_loop(job)
        return job

    def _put_on_loop(self, job: Job) -> None:
        if self._loop is None:
            self._loop = SharedLoop(self._postpone)
        loop = job.loop = self._loop
        job.future = loop.start(self._begin(job, loop), job.call)
        if job.call is not None:
            job.call.loop, job.call.future = loop, job.future

    async def _begin(self, job: Job, loop: SharedLoop) -> Any:
        with self._change:
            if job not in self._jobs or job.loop is not loop:
                return None  # it was abandoned, or runs on another loop
            self._jobs.remove(job)
        return await job.make()

    def _postpone(self, loop: SharedLoop, owner: Any, seconds: float) -> None:
        with self._change:
            for call in self._running.values():
                if call.loop is loop and call is not owner:
                    call.postpone(seconds)

    def _replace_loop(self) -> None:
        """Start a new event loop for further jobs. Running jobs may still finish on the old loop."""
        now = time.monotonic()
        blocked = None if self._loop is None else self._loop.blocked_for(now)
        self._drop_loop()
        for job in self._jobs:
            before = job.future
            self._put_on_loop(job)
            before.cancel()
            if job.call is not None and blocked is not None:
                job.call.postpone(now - blocked[1])

    def _drop_loop(self) -> None:
        with self._change:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.stop_when_idle()

    async def _run_async(self, call: Call) -> None:
        result = CallResult(call.key)
        with self._change:
            call.started = time.monotonic()
            self._change.notify_all()  # there is a new deadline to watch
        try:
            async with asyncio.timeout(call.timeout) as limit:
                call.limit = limit
                # Caught here: an asyncio task lets SystemExit through, which would end the loop.
                result.value = await call.func()
        except BaseException as error:
            result.timed_out = limit.expired()
            result.error = None if result.timed_out else error
        call.limit = None
        result.seconds = time.monotonic() - call.started
        overdue = call.timeout is not None and result.seconds > call.timeout
        if overdue and not result.timed_out:  # it blocked the loop, so its limit was not noticed
            result.value, result.error, result.timed_out = None, None, True
            result.blocked = call.blocked_by(time.monotonic())
        self._finish(call, result)
