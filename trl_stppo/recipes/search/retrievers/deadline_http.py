"""HTTP requests that end in time: connections that are kept, and clocks that a slow server cannot stop.

A socket's timeout starts anew with every byte received, so a server that sends one byte now and then
holds a reader for ever. Here every single wait gets what is left of the request's time.
"""

import http.client
import io
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from .forks import in_every_child

MAX_BYTES = 64 * 2**20
_KEPT = 64  # idle connections
_USER = re.compile(r"//[^/]*@")


class Deadline:
    """A point in time, by the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        """So many seconds from now."""
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this request is over")
        return left

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it will have passed in so many seconds."""
        return time.monotonic() + seconds >= self._end


class Poster:
    """Posts to one URL. Thread-safe; connections are kept for the next request of any thread."""

    def __init__(self, url: str) -> None:
        """Check the URL; nothing is connected.

        Args:
            url: http or https, with a host and perhaps a port and a path.

        Raises:
            ValueError: another kind of URL.
        """
        parts = checked_url(url)
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._start()
        in_every_child(self._start)

    def _start(self) -> None:
        # Of a forked child: the connections so far are the parent's.
        self._idle: deque[http.client.HTTPConnection] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def post(self, body: bytes, deadline: Deadline) -> tuple[int, bytes]:
        """Send JSON, and read the whole answer.

        A connection that the server has closed since the last request is replaced at once; that is
        no failure of the request.

        Returns:
            status, and the body.

        Raises:
            OSError, http.client.HTTPException: no complete answer by the deadline.
        """
        kept = self._take()
        if kept is not None:
            try:
                return self._ask(kept, body, deadline)
            except (ConnectionError, http.client.RemoteDisconnected):
                deadline.left()
        return self._ask(self._connect(deadline), body, deadline)

    def _ask(
        self, connection: http.client.HTTPConnection, body: bytes, deadline: Deadline
    ) -> tuple[int, bytes]:
        with _closing_unless_kept(connection) as keep:
            connection.sock.settimeout(deadline.left())
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            connection.request("POST", self._path, body, headers)
            response = _response(connection, deadline)
            data = response.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise http.client.HTTPException(f"the answer has more than {MAX_BYTES} bytes")
            if not response.will_close and response.isclosed():
                self._give_back(connection)
                keep.append(connection)
            return response.status, data

    def _connect(self, deadline: Deadline) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        assert self._host is not None  # checked_url
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port)
        connection.timeout = deadline.left()
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            surplus = self._idle.popleft() if len(self._idle) == _KEPT else None
            self._idle.append(connection)
        if surplus is not None:
            surplus.close()


def checked_url(url: str) -> SplitResult:
    """The parts of a URL that can be asked.

    Raises:
        ValueError: something in it is not allowed, or would be misunderstood later.
    """

    def refused(reason: str, fix: str) -> ValueError:
        shown = _USER.sub("//...@", url)  # it may hold a password
        return ValueError(
            f"url is {shown!r}; {reason}. Allowed are http and https with a host, for example "
            f"http://127.0.0.1:8000/retrieve. {fix}"
        )

    # Before it is taken apart: `urlsplit` drops line breaks silently.
    if not all("!" <= character <= "~" for character in url):
        raise refused(
            "it holds a space or a character that is not ASCII",
            "Percent-encode the path (%20), and write the host's name in its xn-- form.",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise refused(f"{error}", "Correct it.") from None
    if parts.username is not None:
        raise refused(
            "it holds a user or a password, which would not be sent",
            "Leave them out; the server has no authentication.",
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise refused("its scheme is another, or it has no host", "Correct it.")
    if port == 0 or parts.netloc.endswith(":"):
        raise refused("its port is missing or 0", "Use the port that the server prints.")
    if parts.fragment:
        raise refused(f"#{parts.fragment} would not be sent", "Leave it out.")
    return parts


@contextmanager
def _closing_unless_kept(
    connection: http.client.HTTPConnection,
) -> Iterator[list[http.client.HTTPConnection]]:
    kept: list[http.client.HTTPConnection] = []
    try:
        yield kept
    finally:
        if not kept:
            connection.close()


def _response(
    connection: http.client.HTTPConnection, deadline: Deadline
) -> http.client.HTTPResponse:
    """The answer to the request just sent, read under the deadline."""
    clocked: Any = _ClockedSocket(connection.sock, deadline)
    connection.response_class = lambda sock, *args, **kwargs: http.client.HTTPResponse(  # type: ignore[assignment]
        clocked, *args, **kwargs
    )
    return connection.getresponse()


class _ClockedSocket:
    """What `HTTPResponse` wants of a socket: a file to read from."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def makefile(self, mode: str, *args: Any) -> io.BufferedReader:
        """A reader whose every wait has what is left of the time."""
        return io.BufferedReader(_ClockedReader(self._sock, self._deadline))


class _ClockedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open until it is closed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._file.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
