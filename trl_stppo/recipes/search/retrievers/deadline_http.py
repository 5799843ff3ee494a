"""HTTP requests that end in time: httpx, with one clock over a whole request.

A timeout of httpx starts anew with every byte received, so a server that sends one byte now and then
holds a reader for ever. Here a request is a task of an event loop, which is cancelled when its time is
over, wherever it is.
"""

import asyncio
import re
import ssl
import threading
import weakref
from collections.abc import Coroutine
from typing import Any
from urllib.parse import SplitResult, urlsplit

from .forks import in_every_child

try:  # what huggingface_hub brings: the former from its version 2 on
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

MAX_BYTES = 64 * 2**20
# What a request fails with.
FAILURES = (OSError, httpx.TransportError)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=None)
# `identity`: a small compressed answer may be a huge one.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_CONNECTED, _ANSWERED = "connection.connect_tcp.started", "http11.receive_response_headers.complete"
_USER = re.compile(r"//[^/]*@")


class _Loop:
    """One event loop per process, on a thread of its own that begins with the first call."""

    def __init__(self) -> None:
        self._parents: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start()
        in_every_child(self._start)

    def _start(self) -> None:
        # A forked child has the parent's loop without its thread. Collected, the loop could take from the
        # parent what both wait on: an epoll object is shared.
        self._parents.append(self._loop)
        self._lock, self._loop = threading.Lock(), None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What it returns; what it raises is raised."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="retriever-http", daemon=True
                ).start()
        coming = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return coming.result()
        finally:
            coming.cancel()  # where the caller was interrupted

    def close(self, client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        """Close its connections, unless they are a parent's."""
        if loop is self._loop:
            loop.call_soon_threadsafe(lambda: loop.create_task(client.aclose()))


_loop = _Loop()


class Poster:
    """Posts to one URL. Thread-safe; connections are kept for the next request of any thread."""

    def __init__(self, url: str) -> None:
        """Check the URL; nothing is connected.

        Args:
            url: http or https, with a host and perhaps a port and a path.

        Raises:
            ValueError: another kind of URL.
        """
        self._url, self._secure = url, checked_url(url).scheme == "https"
        self._start()
        in_every_child(self._start)

    def _start(self) -> None:
        # Of a forked child: the connections so far are the parent's.
        self._client: httpx.AsyncClient | None = None

    def post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Send JSON, and read the whole answer.

        A connection that the server has closed since the last request is replaced at once; that is
        no failure of the request.

        Args:
            body: JSON.
            seconds: for all of it, from resolving the host's name to the last byte.

        Returns:
            status, and the body.

        Raises:
            OSError, httpx.TransportError: no complete answer in that time.
        """
        return _loop.run(self._post(body, seconds))

    async def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    seen: set[str] = set()
                    try:
                        return await self._ask(body, seen)
                    except (httpx.NetworkError, httpx.RemoteProtocolError):
                        if seen & {_CONNECTED, _ANSWERED}:
                            raise
        except TimeoutError:
            raise TimeoutError(f"no complete answer in {seconds:.3g} s") from None

    async def _ask(self, body: bytes, seen: set[str]) -> tuple[int, bytes]:
        async def trace(event: str, info: Any) -> None:
            seen.add(event)

        request: dict[str, Any] = {"content": body, "headers": _HEADERS}
        request["extensions"] = {"trace": trace}
        async with self._opened().stream("POST", self._url, **request) as response:
            data = bytearray()
            async for part in response.aiter_raw():
                data += part
                if len(data) > MAX_BYTES:
                    raise httpx.RemoteProtocolError(f"the answer has more than {MAX_BYTES} bytes")
            return response.status_code, bytes(data)

    def _opened(self) -> httpx.AsyncClient:
        """The client; made, and used, on the loop alone."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=ssl.create_default_context() if self._secure else False,
                timeout=None,
                limits=_LIMITS,
                trust_env=False,
            )
            closing = weakref.finalize(self, _loop.close, self._client, asyncio.get_running_loop())
            closing.atexit = False
        return self._client


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
