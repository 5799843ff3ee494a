"""Starts Pythons that have their imports behind them: seconds less for each, on every core.

`Process` and `run` are those of `subprocess`, for commands that begin with this Python. The first start
brings up one parent (`warm_parent.py`); each is a fork of it, in a process group of its own. Such a start
cannot show how a program begins: what it imports, in which order, a variable of the environment that is
read then, and that two processes iterate over a set in two orders. Tests of that start theirs cold, with
`subprocess`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
# Imported by the parent, with what they import; none decides at import what a test sets later.
MODULES = (
    "bitsandbytes", "yaml", "rich.console", "trl_stppo.cli.main", "tests.kit.builders",
    "tests.kit.scripted",
)  # fmt: skip
# As it is now, before a test changes it for itself. pyarrow's allocator would start a thread.
_OF_PARENT = {**os.environ, **ENVIRONMENT, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Read when packages are imported, and then no more.
_AT_IMPORT = (
    "HF_", "OMP_", "MKL_", "OPENBLAS_", "TRANSFORMERS_", "PYTHONHASHSEED", "PYTHONWARNINGS", "USE_TF",
)  # fmt: skip


class _Parent:
    """The process that forks, and the line to it."""

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        self.environment = _OF_PARENT
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until `end`)
        self._line, far = socket.socketpair()
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.warm_parent", str(far.fileno()), *modules],
                **{"cwd": ROOT, "env": self.environment, "pass_fds": [far.fileno()]},
                **{"stdin": subprocess.DEVNULL, "stdout": self._said, "stderr": self._said},
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> list[int]:
        data = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                sent = socket.send_fds(self._line, [data], descriptors)
                self._line.sendall(data[sent:])
                answer = b""
                while not answer.endswith(b"\n"):
                    answer += self._line.recv(1 << 16) or self._gone()
            except BrokenPipeError:
                self._gone()
        return json.loads(answer)

    def _gone(self) -> bytes:
        code = self.process.wait()
        self._said.seek(0)
        said = self._said.read()[-4000:]
        raise RuntimeError(f"the parent of warm processes has ended with {code}: {said}")

    def end(self) -> None:
        self._line.close()
        self.process.wait()
        self._said.close()


_parents: list[_Parent] = []


def parent() -> _Parent:
    """This process's own; one that it was forked with is its parent's."""
    if not _parents or _parents[0].owner != os.getpid():
        _parents[:] = [_Parent()]
    return _parents[0]


def end() -> None:
    """Ends the parent, if there is one, and all that it has started."""
    while _parents and _parents[0].owner == os.getpid():
        _parents.pop().end()


class Process(subprocess.Popen):
    """A Popen whose child is a fork of the warm parent; three methods of it are all that touch one."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
                       pass_fds: Any, cwd: Any, env: Any, *rest: Any) -> None:  # fmt: skip
        python, *words = map(os.fspath, args)
        assert python == sys.executable, "a warm process is a Python"
        descriptors = rest[3:9]
        env = dict(os.environ if env is None else env)
        self._parent = parent()
        known = self._parent.environment
        for name in sorted(env.keys() | known.keys()):
            if name.startswith(_AT_IMPORT) and env.get(name, known.get(name)) != known.get(name):
                raise ValueError(f"{name} is read at import: start this one cold, with subprocess")
        theirs = [descriptors[0], descriptors[3], descriptors[5]]
        null = os.open(os.devnull, os.O_RDWR)
        try:
            theirs = [null if descriptor == -1 else descriptor for descriptor in theirs]
            request = {"words": words, "cwd": os.fspath(cwd or os.getcwd()), "env": env}
            self.pid, _ = self._parent.ask(request, tuple(theirs))
        finally:
            self._close_pipe_fds(*descriptors)
            os.close(null)
        self._child_created = True

    def kill_group(self) -> None:
        """What it has started, too; it leads a group of its own."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        while True:
            if self._parent.process.returncode is not None:
                return self.pid, signal.SIGKILL
            pid, status = self._parent.ask({"wait": self.pid})
            if pid or wait_flags & os.WNOHANG:
                return pid, status
            time.sleep(0.01)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        # Not while it is deleted, nor while another thread waits.
        if self.returncode is None and _deadstate is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    words: list[Any], *, input: str | None = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for these words with captured output, as text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Process(words, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill_group()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)
