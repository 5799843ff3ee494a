"""The process that forks, kills and reaps the processes of isolated environments, and those."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import io
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .isolation_wire import MISSING, pack, pack_error, receive, send

REAP_TIMEOUT = 2.0  # seconds to wait for a killed process; longer only if the kernel holds it
_PR_SET_PDEATHSIG = 1
_SERVER_CODE = (
    "import sys; fd, caller, sys.path[:] = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]; "
    "sys.argv[1:] = []; from trl_stppo.rollout import isolation_server; isolation_server._serve(fd, caller)"
)


def release_sockets(owner: int, *ends: socket.socket) -> None:
    """Close sockets; in the process that made them, cut their connections too."""
    # A fork of the caller (a DataLoader worker) holds copies; dropping those must not kill the child.
    if os.getpid() == owner:
        shut(*ends)
    for end in ends:
        end.close()


def shut(*ends: socket.socket) -> None:
    """Cut the connection for everyone: `close` would not while a forked process holds a copy."""
    for end, how in zip(ends, (socket.SHUT_RDWR, socket.SHUT_WR), strict=False):
        with contextlib.suppress(OSError):
            end.shutdown(how)


class _Child:
    """The environment and the loop that it lives with."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.env: Any = None
        self.closing = False
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)  # for clients that look it up in a constructor

    def run(self) -> None:
        """Make the environment; answer requests until the caller closes it or goes away."""
        task: Callable[..., Any] = self.make
        with contextlib.suppress(OSError, EOFError):
            while not self.closing:
                request = receive(self.connection)
                send(self.connection, self.attempt(task, request))
                task = self.answer

    def attempt(self, task: Callable[..., Any], request: bytes) -> bytes:
        try:
            return pack(self.awaited(task(*pickle.loads(request))))
        except BaseException as error:
            return pack_error(error)

    def awaited(self, value: Any) -> Any:
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def make(self, setting: tuple[list[str], str, dict[str, str]], factory: bytes) -> Any:
        sys.path[:], folder, variables = setting
        with contextlib.suppress(OSError):  # the folder may be gone
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        self.env = self.awaited(pickle.loads(factory)())
        return os.getpid(), type(self.env).__name__, _public_methods(self.env)

    def answer(self, kind: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind == "get":
            return getattr(self.env, name, MISSING)
        self.closing = kind == "close"
        if self.closing and not callable(getattr(self.env, name, None)):
            return None
        return getattr(self.env, name)(*args, **kwargs)


def _public_methods(env: Any) -> list[str]:
    names = [name for name in dir(env) if not name.startswith("_")]
    # Properties are not looked at: reading one may be expensive, or raise.
    names = [name for name in names if not isinstance(getattr(type(env), name, None), property)]
    values = [(name, getattr(env, name, None)) for name in names]
    return [name for name, value in values if callable(value) and not isinstance(value, type)]


class _Server:
    """The caller's handle on its fork server."""

    def __init__(self) -> None:
        if not (hasattr(os, "fork") and hasattr(socket, "send_fds")):
            raise NotImplementedError("environments in processes need a POSIX system (os.fork)")
        self.owner = os.getpid()
        self.control, far = socket.socketpair()
        with far:
            arguments = [str(far.fileno()), str(self.owner), *sys.path]
            # A session of its own keeps the terminal's Ctrl-C away before SIGINT is ignored.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER_CODE, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[far.fileno()],
                start_new_session=True,
            )
        weakref.finalize(self, _stop_server, self.owner, self.control, self.process)

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None


def _stop_server(owner: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    release_sockets(owner, control)
    if os.getpid() == owner:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_TIMEOUT + 1.0)


_server: _Server | None = None
_server_lock = threading.Lock()


def request_child() -> tuple[socket.socket, socket.socket]:
    """The connection to a new child, and its lifeline.

    The lifeline leads to the server: shutting it kills the child, and it tells how the child ended.
    """
    global _server
    ours, theirs = socket.socketpair()
    lifeline, far = socket.socketpair()
    with theirs, far:
        with _server_lock:
            if _server is None or not _server.usable:
                _server = _Server()
            control = _server.control
        with contextlib.suppress(OSError):  # it died a moment ago: the caller will read an end
            socket.send_fds(control, [b"+"], [far.fileno(), theirs.fileno()])
    return ours, lifeline


def _serve(fd: int, caller: int) -> None:
    """Be the server; returns in the server at its end, and in each child at its."""
    connection = _ForkServer(socket.socket(fileno=fd), caller).run()
    if connection is not None:
        _Child(connection).run()


class _ForkServer:
    """One thread that forks, kills and reaps. Never runs code of an environment itself."""

    def __init__(self, control: socket.socket, caller: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the trainer
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # what was printed survives a kill
        self.control, self.caller, self.done = control, caller, False
        self.lifelines: dict[int, socket.socket] = {}  # by pid of the child
        self.wake, self.wakes = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        for end in (control, self.wake):
            self.selector.register(end, selectors.EVENT_READ)
        self.wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
        signal.set_wakeup_fd(self.wakes.fileno(), warn_on_full_buffer=False)
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        with contextlib.suppress(ImportError):  # or each factory by value would import it anew
            import dill  # noqa: F401
        gc.freeze()  # a collection in a child would copy the pages that it shares

    def run(self) -> socket.socket | None:
        """Serve until the caller is gone. Returns None then, and in a child its connection."""
        # The parent is asked for too: a fork of the caller may hold the control socket open.
        while not self.done and os.getppid() == self.caller:
            for key, _ in self.selector.select(timeout=1.0):
                if key.fileobj is self.wake:
                    self.wake.recv(4096)
                elif key.fileobj is not self.control:
                    self.selector.unregister(key.fileobj)
                    self._kill(key.data)
                elif (connection := self._obey()) is not None:
                    return connection
            self._reap()
        self._end()
        return None

    def _obey(self) -> socket.socket | None:
        """Take one order for a child. In the child its connection, in the server None."""
        order, fds = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            order, fds, *_ = socket.recv_fds(self.control, 1, 2)
        ends = [socket.socket(fileno=fd) for fd in fds]
        self.done = not order
        pid, reason = -1, "not started: out of file descriptors"
        if len(ends) == 2:
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"not started: {error}"
        if pid == 0:
            self._become_child(ends[0])
            return ends[1]
        for lifeline in ends[:1]:
            if pid > 0:
                self.lifelines[pid] = lifeline
                self.selector.register(lifeline, selectors.EVENT_READ, pid)
            else:
                self._report(lifeline, reason)
        for connection in ends[1:]:
            connection.close()
        return None

    def _become_child(self, lifeline: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for end in (self.control, self.wake, self.wakes, lifeline, *self.lifelines.values()):
            end.close()
        os.setsid()  # so that its subprocesses can be killed with it
        if self.libc is not None:
            self.libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # if the server is killed

    def _kill(self, pid: int) -> None:
        # Only what is not reaped yet is asked for, so the number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self.lifelines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            end = f"exit code {code}"
            if code < 0:
                end = f"signal {-code} ({signal.strsignal(-code)})"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # the subprocesses that it leaves
            lifeline = self.lifelines.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(lifeline)
            self._report(lifeline, end)

    def _report(self, lifeline: socket.socket, end: str) -> None:
        with contextlib.suppress(OSError):
            lifeline.send(end.encode())
        lifeline.close()

    def _end(self) -> None:
        for pid in self.lifelines:
            self._kill(pid)
        deadline = time.monotonic() + REAP_TIMEOUT
        while self.lifelines and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
