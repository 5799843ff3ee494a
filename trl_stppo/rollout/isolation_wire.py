"""Messages between the caller of an isolated environment and its process."""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
import threading
import time
import traceback
import types
from typing import Any

HEADER = struct.Struct("!Q")
MISSING = object()


class Late(Exception):
    """A deadline passed. Not a TimeoutError, which the environment itself may raise."""


class _ByName(pickle.Pickler):
    """Refuses what `__main__` defines: in the child that name means another module."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


_dill_lock = threading.Lock()  # dill keeps state in globals while it pickles


def dumps(value: Any, what: str) -> bytes:
    """Pickle by name, otherwise by value; TypeError names `what`."""
    buffer = io.BytesIO()
    try:
        _ByName(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception as by_name:
        try:
            import dill

            with _dill_lock:
                # recurse: only the globals that the code refers to, not the whole module.
                return dill.dumps(value, recurse=True)
        except Exception as by_value:
            raise TypeError(
                f"{what} cannot be sent to another process: {by_name}; by value: {by_value}"
            ) from None


def pack(value: Any) -> bytes:
    """A reply: the value, or why it cannot travel."""
    if value is MISSING:
        return pickle.dumps(("missing",))
    kind = type(value).__name__
    try:
        return pickle.dumps(("value", kind, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))
    except Exception as error:
        return pickle.dumps(("unpicklable", kind, str(error)))


def pack_error(error: BaseException) -> bytes:
    """A reply: what was raised, with its traceback as text."""
    try:
        message = str(error)
    except Exception:
        message = "<unprintable>"
    try:
        body: bytes | None = pickle.dumps(error)
        again = pickle.loads(body or b"")
        # An `__init__` that builds the message would build it around itself a second time.
        if type(again) is not type(error) or str(again) != message:
            body = None
    except Exception:
        body = None
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(("error", type(error).__name__, message, trace, body))


def unpack(reply: bytes, what: str) -> Any:
    """Return or raise what a reply holds."""
    kind, *rest = pickle.loads(reply)
    if kind == "missing":
        return MISSING
    if kind == "error":
        raise _rebuilt(*rest)
    name, body = rest
    if kind == "value":
        try:
            return pickle.loads(body)
        except Exception as error:
            body = str(error)
    raise TypeError(f"{what} gave a {name}, which cannot be sent between processes: {body}")


def _rebuilt(name: str, message: str, trace: str, body: bytes | None) -> Exception:
    error: Any = None
    if body is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(body)
    # What is not an Exception (SystemExit, KeyboardInterrupt) would end the caller's thread.
    if not isinstance(error, Exception):
        error = RuntimeError(f"{name}: {message}")
    error.add_note(f"In the environment's process:\n{trace}")
    return error


def send(end: socket.socket, data: bytes, deadline: float | None = None) -> None:
    """Send a message whole; `deadline` on the monotonic clock, in seconds."""
    _limit(end, deadline)
    end.sendall(HEADER.pack(len(data)) + data)


def receive(end: socket.socket, deadline: float | None = None) -> bytes:
    """Receive a message whole; `deadline` on the monotonic clock, in seconds."""
    data = bytearray()
    size = start = HEADER.size
    while len(data) < size:  # nothing follows a message before it is answered
        _limit(end, deadline)
        chunk = end.recv(1 << 18)
        if not chunk:
            raise EOFError
        data += chunk
        if size == start <= len(data):
            size += HEADER.unpack_from(data)[0]
    return bytes(data[start:])


def _limit(end: socket.socket, deadline: float | None) -> None:
    # Zero would mean "do not block", which fails in another way than a timeout does.
    end.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
