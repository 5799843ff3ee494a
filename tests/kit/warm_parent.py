"""A process that has imported the heavy packages and forks for each start; `tests/kit/warm.py` talks to it.

It runs no tensor and has one thread, so that a fork of it is what a new process would be after its imports.
Its arguments are the descriptor of a socket, and what to import. Requests come as a line of JSON each on that
socket; the answer is a line too. When the socket closes, because whoever started this has ended, it kills
what it has started and ends.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
from typing import Any


def preload(modules: list[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [""]
    if len(threads) > 1:
        raise RuntimeError(f"an import has started a thread; {len(threads)} cannot be forked")
    # A collection in a child would copy every page.
    gc.freeze()


def read_request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request and the descriptors that came with it; an empty one where the socket has closed."""
    data, descriptors, *_ = socket.recv_fds(control, 1 << 16, 3)
    while data and not data.endswith(b"\n"):
        data += control.recv(1 << 16)
    return (json.loads(data) if data else {}), list(descriptors)


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Answers until the socket closes. In each child it returns what the child is to run."""
    children: set[int] = set()
    while True:
        request, descriptors = read_request(control)
        if not request:
            break
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            children.discard(pid)
            answer = [pid, status]
        else:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setpgid(0, 0)
                control.close()
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return request
            children.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = [pid, 0]
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
    return None


def become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Runs `-m module`, `-c code` or a script as a Python that is started with these words does."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    kind, *rest = words
    sys.orig_argv = [sys.executable, *words]
    if kind == "-m":
        sys.path[0], sys.argv = cwd, rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        name, source = "<string>", rest[0]
    else:
        name = main.__file__ = os.path.abspath(kind)
        sys.path[0], sys.argv = os.path.dirname(name), words
        source = open(name).read()  # noqa: SIM115 (closed at once)
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    # A launcher that is tested in the process of the tests sends it on to all children, this one among them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    preload(sys.argv[2:])
    task = serve(socket.socket(fileno=int(sys.argv[1])))
    # Out here, where an exit, an error or a signal ends the child as it ends any Python.
    if task is not None:
        become(**task)
