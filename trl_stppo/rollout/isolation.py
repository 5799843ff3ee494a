"""Environments in separate processes, so that a hang or a crash ends one episode.

A process can be stopped from outside, a thread cannot. `IsolatedEnvironment.kill` ends a tool that loops
forever. `os._exit`, `sys.exit` or a segfault in a tool become an exception of the caller. This protects
against accidents, not against attacks, because the caller unpickles the replies.

It is unsafe to fork a process that runs torch and threads, and `multiprocessing` runs the main script again
in each child. So a new interpreter imports this module and forks. The fork has the environment. The first
process, the guard, kills the fork and its subprocesses if the caller ends or ends the guard. The guard ends
with the fork.

Limits: POSIX only. Results must be picklable by name, so their types cannot come from `__main__`. An
asyncio loop runs only during calls. Processes that leave the child's session outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# Seconds for the environment's `close`.
CLOSE_TIMEOUT = 2.0
# Seconds until a killed process ends, unless the kernel holds the process.
REAP_TIMEOUT = 2.0
_PR_SET_PDEATHSIG = 1
_CODE = (
    "import sys; fd, caller, sys.path[:] = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]; "
    "sys.argv[1:] = []; from trl_stppo.rollout import isolation; isolation._guard(fd, caller)"
)
# Lock around dill, which keeps state in globals while it pickles.
_dill_lock = threading.Lock()


class EnvironmentDied(RuntimeError):
    """Error of a call whose environment process has ended. Its message has the exit code or signal."""


@dataclass(frozen=True)
class Isolated:
    """An environment factory whose environments play in processes of their own.

    A call makes an ordinary instance in this process, from which a trainer reads the kind and the tools.
    """

    factory: Callable[[], Any]

    def __call__(self) -> Any:
        """Make an environment without a process of its own."""
        return self.factory()


def isolated(factory: Callable[[], Any]) -> Callable[[], Any]:
    """Give each environment of a factory a separate process, so that a hang or a crash ends one episode.

    The process is killed if a call exceeds its time limit. A process takes 0.1 s to start and 15 MB, plus the
    imports of the factory. Results of methods must be picklable. POSIX only.

    Args:
        factory: makes environments without arguments: a class, a function, a partial, also a lambda.

    Returns:
        A factory for `environment_factory`, as it is or as a value of its dict.

    Raises:
        TypeError: the factory cannot be called.
    """
    if not callable(factory):
        raise TypeError(f"`factory={factory!r}` must be callable.")
    return Isolated(factory)


class _Late(Exception):
    """Error of a call that took too long, unlike a TimeoutError that the environment itself may raise."""


class IsolatedEnvironment:
    """An environment in a child process. Callers use it like an environment in this process.

    Public methods and attributes of the environment are found by name (`env.step("x")`); `call` also
    reaches methods that this class hides. Calls run one at a time. Attributes are copies. `pid` is the
    child's process id, and `methods` has the names of the environment's public methods.
    """

    def __init__(self, factory: Callable[[], Any], *, start_timeout: float = 60.0) -> None:
        """Start the child process, and make the environment there within `start_timeout` seconds."""
        name = getattr(factory, "__qualname__", type(factory).__name__)
        body = _dumps(factory, f"the environment factory `{name}`")
        self.env_type_name, self.pid = name, 0
        self.methods: frozenset[str] = frozenset()
        self._lock, self._killed = threading.Lock(), False
        self._connection, theirs = multiprocessing.Pipe()
        own = os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(own), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A separate session shields the process from the terminal's Ctrl-C.
                start_new_session=True,
            )
        self._release = weakref.finalize(self, _release, own, self._connection, self._process)
        try:
            made = self._ask("the factory", "make", body, seconds=start_timeout)
        except BaseException as error:
            self.kill()
            if isinstance(error, _Late):
                raise TimeoutError(f"no environment of `{name}` after {start_timeout:g} s") from None
            raise
        self.pid, self.env_type_name, self.methods = made

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method in the child and return a copy of its result. `kill` ends a hanging call.

        Raises:
            EnvironmentDied: the child ended, or was killed, before or during the call.
            TypeError: arguments or result cannot be sent between processes.
            Exception: the method's exception, with the child's traceback as a note. If pickling changes it,
                and for SystemExit and its like, it is a RuntimeError that reads "TypeName: message".
        """
        return self._ask(f"`{method}`", "call", method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Refuse dunder names, with which pickle, copy and inspect would detect protocols that do not exist.
        if name.startswith("__") or "methods" not in self.__dict__:
            raise AttributeError(name)
        if name in self.methods:
            return functools.partial(self.call, name)
        return self._ask(f"`{name}`", "get", name)

    def kill(self) -> None:
        """Kill the child and its subprocesses. Any thread may call this, also repeatedly."""
        self._killed = True
        self._process.terminate()
        self._wait(REAP_TIMEOUT)
        # Keep a descriptor open while another thread reads it, because its number could be reused.
        if self._lock.acquire(timeout=1.0):
            self._release()
            self._lock.release()

    def close(self) -> None:
        """Call the environment's `close`, if it has one, for 2 seconds at most, and kill the child."""
        try:
            if "close" in self.methods:
                self._ask("`close`", "call", "close", seconds=CLOSE_TIMEOUT)
        except (_Late, EnvironmentDied):
            pass
        finally:
            self.kill()

    def _ask(self, what: str, *request: Any, seconds: float | None = None) -> Any:
        message, started = _dumps(request, f"an argument of {what}"), time.monotonic()
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise _Late
        try:
            self._connection.send_bytes(message)
            spent = time.monotonic() - started
            if not self._connection.poll(None if seconds is None else max(0.0, seconds - spent)):
                raise _Late
            reply = self._connection.recv_bytes()
        except (OSError, EOFError):
            reply = b""
        except BaseException:
            # End the process, because the next call would read the late reply.
            self._process.terminate()
            raise
        finally:
            self._lock.release()
        if reply:
            returned, value = pickle.loads(reply)
            if returned:
                return value
            raise value
        code = None if self._killed else self._wait(REAP_TIMEOUT)
        end = "killed on request" if self._killed else f"exit code {code}"
        if code is not None and code < 0:
            end = f"signal {-code} ({signal.strsignal(-code)})"
        self.kill()
        who = f"the process of {self.env_type_name} (pid {self.pid})"
        raise EnvironmentDied(f"{who} ended in or before {what}: {end}")

    def _wait(self, seconds: float) -> int | None:
        """Return the child's exit code, or None if it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.0, seconds))
        return None


def _release(owner: int, connection: Connection, process: subprocess.Popen[bytes]) -> None:
    # A fork of the caller, such as a DataLoader worker, must not end the child.
    if os.getpid() == owner:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_TIMEOUT)
    connection.close()


def _dumps(value: Any, what: str) -> bytes:
    """Pickle with dill: importable objects by name, others (lambdas, closures, `__main__`'s) by value.

    A TypeError names `what`.
    """
    import dill

    try:
        with _dill_lock:
            # With `recurse`, pickle only the globals that the code uses, not all globals of its module.
            return dill.dumps(value, recurse=True)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent to another process: {error}") from None


def _pack(value: Any) -> bytes:
    """Pickle a reply with the value, or raise a TypeError that names its type."""
    try:
        return pickle.dumps((True, value), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"a {kind} cannot be sent between processes: {error}") from None


def _pack_error(error: BaseException) -> bytes:
    """Pickle a reply with the exception, or a RuntimeError in its place, and its traceback as a note."""
    sent, text = None, type(error).__name__
    with contextlib.suppress(Exception):
        text = f"{text}: {error}"
        again = pickle.loads(pickle.dumps(error))
        # Drop an exception that pickling changes: its `__init__` may build the message twice.
        same = type(again) is type(error) and str(again) == str(error)
        # Drop other kinds (SystemExit, KeyboardInterrupt), which would end the caller's thread.
        sent = error if same and isinstance(error, Exception) else None
    sent = sent or RuntimeError(text)
    sent.add_note(f"In the environment's process:\n{''.join(traceback.format_exception(error))}")
    return pickle.dumps((False, sent))


def _guard(fd: int, caller: int) -> None:
    """Fork the environment's process, and block until the fork or the caller ends."""
    guard, signals = os.getpid(), (signal.SIGTERM, signal.SIGALRM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if not child:
        # Begin a session, so that the guard can kill the child's subprocesses too.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        # Let the kernel kill the child if the guard is killed.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == guard:
            _serve(Connection(fd))
        return
    os.close(fd)

    def end(number: int, frame: Any) -> None:
        if number == signal.SIGTERM or os.getppid() != caller:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    for number in signals:
        signal.signal(number, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # End the remaining subprocesses of the environment.
        os.killpg(child, signal.SIGKILL)
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
    sys.exit(code)


def _serve(connection: Connection) -> None:
    """Answer the caller's requests in the environment's process, until the caller closes it or ends."""
    loop = asyncio.new_event_loop()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    env: Any = None

    def awaited(value: Any) -> Any:
        return loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def answer(kind: str, name: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal env
        if kind == "make":
            env = awaited(pickle.loads(name)())
            return os.getpid(), type(env).__name__, _public_methods(env)
        value = getattr(env, name)
        return awaited(value(*args, **(kwargs or {}))) if kind == "call" else value

    with contextlib.suppress(OSError, EOFError):
        while True:
            request = connection.recv_bytes()
            # Set the current loop, because clients look it up, and `asyncio.run` in a call removes it.
            asyncio.set_event_loop(loop)
            try:
                reply = _pack(answer(*pickle.loads(request)))
            except BaseException as error:
                reply = _pack_error(error)
            connection.send_bytes(reply)


def _public_methods(env: Any) -> frozenset[str]:
    # Look without reading, because reading a property may be expensive, or raise.
    found = {n: inspect.getattr_static(env, n, None) for n in dir(env) if not n.startswith("_")}
    # An object with `__call__` plays in the child too; the caller would get a copy of it.
    methods = {name for name, value in found.items() if inspect.isroutine(value) or callable(value)}
    return frozenset(n for n in methods if not isinstance(found[n], type | functools.cached_property))
