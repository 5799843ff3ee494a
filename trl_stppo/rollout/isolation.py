"""Environments in processes of their own, so that a hang or a crash in one costs only that one.

A thread cannot be stopped from outside, a process can: `IsolatedEnvironment.kill` ends a tool that
loops forever, and `os._exit`, `sys.exit` or a segfault in a tool reach the caller as an exception.
This protects against accidents, not against malice: replies are unpickled by the caller.

Forking a process that runs torch and threads is unsafe, and `multiprocessing` runs the main script
again in each child. So one small server process, started on first use, imports this module and nothing
heavy; every child is a fork of it. The server kills and reaps its children, the moment the caller
ends included, so that neither zombies nor orphans stay.

How a factory travels: by pickle if everything in it can be imported by name in the child (which gets
the caller's `sys.path`, working directory and environment variables), otherwise by value with dill:
lambdas, closures, local classes, and whatever `__main__` defines. Sent by value, it has no access to
later changes of the caller's globals; what it imports is imported once per child.

Limits: POSIX only. Results must be picklable by name, so not of a type that `__main__` defines. An
asyncio loop runs during calls only. Processes that leave the child's session outlive it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .isolation_server import REAP_TIMEOUT, release_sockets, request_child, shut
from .isolation_wire import MISSING, Late, dumps, receive, send, unpack

CLOSE_TIMEOUT = 2.0  # seconds that `close` gives the environment


class EnvironmentDied(RuntimeError):
    """The environment's process has ended; the message names its exit code or signal."""


class IsolatedEnvironment:
    """An environment that lives in a child process and is used like the object itself.

    Public methods and attributes of the environment are found by name (`env.step("x")`); `call` and
    `get` reach also those that this class hides (`call`, `get`, `kill`, `close`, ...).
    Thread-safe: calls take turns, while `kill` works from any thread at any time. Attributes are
    copies, and assigning one does not reach the child.

    Attributes:
        env_type_name: name of the environment's type.
        methods: names of its public methods.
        pid: process id of the child.
    """

    def __init__(self, factory: Callable[[], Any], *, start_timeout: float = 60.0) -> None:
        """Start the child and make the environment in it.

        Args:
            factory: makes the environment; called (and awaited, if need be) in the child.
            start_timeout: seconds until the environment must exist.

        Raises:
            TypeError: the factory cannot be sent to another process.
            TimeoutError: the environment was not there in time.
            EnvironmentDied: the child ended while it made the environment.
            Exception: whatever the factory raised, as in `call`.
        """
        deadline = time.monotonic() + start_timeout
        name = getattr(factory, "__qualname__", type(factory).__name__)
        setting = (list(sys.path), os.getcwd(), dict(os.environ))
        request = dumps((setting, dumps(factory, f"the environment factory `{name}`")), name)
        self.env_type_name, self.pid = name, 0
        self.methods: frozenset[str] = frozenset()
        self._lock, self._end_lock = threading.Lock(), threading.Lock()
        self._end: str | None = None
        self._killed = False
        self._socket, self._lifeline = request_child()
        self._release = weakref.finalize(
            self, release_sockets, os.getpid(), self._socket, self._lifeline
        )
        try:
            self.pid, self.env_type_name, methods = self._ask(request, "the factory", deadline)
        except Late:
            self.kill()
            raise TimeoutError(
                f"the environment of `{name}` was not there after {start_timeout:g} s"
            ) from None
        except BaseException:
            self.kill()
            raise
        self.methods = frozenset(methods)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the environment in the child, and await it there if it is a coroutine.

        There is no timeout: `kill` from another thread ends a call that hangs.

        Returns:
            A copy of what the method returned.

        Raises:
            EnvironmentDied: the child ended, or was killed, before or during the call.
            TypeError: arguments or result cannot be sent between processes.
            Exception: what the method raised, with the child's traceback as a note. Of the same type
                if that survives pickling unchanged, otherwise, and for SystemExit and its like, a
                RuntimeError that reads "TypeName: message".
        """
        what = f"`{method}`"
        request = dumps(("call", method, args, kwargs), f"an argument of {what}")
        return self._ask(request, what)

    def get(self, attribute: str, default: Any = None) -> Any:
        """A copy of an attribute of the environment, or `default` if it has none of that name.

        Raises:
            EnvironmentDied: as in `call`.
            TypeError: the value cannot be sent between processes.
        """
        value = self._ask(dumps(("get", attribute, (), {}), attribute), f"`{attribute}`")
        return default if value is MISSING else value

    def __getattr__(self, name: str) -> Any:
        # Dunder names would make pickle, copy and inspect believe in protocols that do not exist.
        if name.startswith("__") or "methods" not in self.__dict__:
            raise AttributeError(name)
        if name in self.methods:
            return functools.partial(self.call, name)
        value = self.get(name, MISSING)
        if value is MISSING:
            raise AttributeError(f"{self.env_type_name!r} object has no attribute {name!r}")
        return value

    def kill(self) -> None:
        """End the child and its subprocesses at once; a call under way raises EnvironmentDied.

        Works from any thread, any number of times. Returns when the child is gone, usually after
        milliseconds and at the latest after a few seconds.
        """
        self._killed = True
        self._discard()

    def close(self) -> None:
        """Call the environment's `close`, if there is one, and end the child.

        What takes longer than 2 seconds in all, a call under way in another thread included, is
        killed. The child ends in every case.

        Raises:
            Exception: what the environment's `close` raised, as in `call`.
        """
        deadline = time.monotonic() + CLOSE_TIMEOUT
        try:
            self._ask(dumps(("close", "close", (), {}), "close"), "`close`", deadline)
            self._wait_for_end(deadline - time.monotonic())
        except (Late, EnvironmentDied):
            pass
        finally:
            self.kill()

    def _ask(self, request: bytes, what: str, deadline: float | None = None) -> Any:
        wait = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=wait):
            raise Late
        try:
            send(self._socket, request, deadline)
            reply = receive(self._socket, deadline)
        except TimeoutError:
            raise Late from None
        except (OSError, EOFError):
            reply = None
        except BaseException:
            # The reply to come would be taken for that of the next call.
            shut(self._socket, self._lifeline)
            raise
        finally:
            self._lock.release()
        if reply is None:
            raise self._death(what)
        return unpack(reply, what)

    def _death(self, what: str) -> EnvironmentDied:
        end = "killed on request" if self._killed else self._wait_for_end(REAP_TIMEOUT)
        self._discard()
        who = f"the process of {self.env_type_name} (pid {self.pid})"
        return EnvironmentDied(f"{who} ended in or before {what}: {end or 'connection lost'}")

    def _wait_for_end(self, seconds: float) -> str | None:
        """How the child ended, as the server reports it when it has reaped it; None: not yet."""
        with self._end_lock:
            if self._end is None:
                try:
                    self._lifeline.settimeout(max(0.0, seconds))
                    self._end = self._lifeline.recv(1024).decode() or "no word from its fork server"
                except (BlockingIOError, TimeoutError):
                    return None
                except OSError:
                    self._end = "its connection is closed"
            return self._end

    def _discard(self) -> None:
        shut(self._socket, self._lifeline)  # the server kills; a call in `recv` wakes up
        self._wait_for_end(REAP_TIMEOUT)
        # A descriptor that another thread still reads must stay open: its number could be reused.
        if self._lock.acquire(timeout=1.0):
            with self._end_lock:
                self._end = self._end or "not reaped in time"
                self._release()
            self._lock.release()
