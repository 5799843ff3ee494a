"""A retrieval server that goes wrong as told, request by request."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# How long what hangs does so, unless the server is closed before.
HANG_SECONDS = 60.0


def found(query: str, top_k: int) -> list[Any]:
    """What a search finds here."""
    hits = [f'"{query}"\npassage {i}' for i in range(top_k)]
    return [{"document": {"id": str(i), "contents": hit}, "score": 1.0} for i, hit in enumerate(hits)]


class FaultyServer(ThreadingHTTPServer):
    """Behaves by `plan`, one entry per request, then well.

    Entries: ok, hang, reset, close, cut, garbage, shape, or a status.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, *plan: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan = list(plan)
        self.lock, self.released = threading.Lock(), threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/retrieve"


@contextlib.contextmanager
def faulty_server(*plan: str) -> Iterator[FaultyServer]:
    """A running server."""
    server = FaultyServer(*plan)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FaultyServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(asked)
            plan = self.server.plan.pop(0) if self.server.plan else "ok"
        hits = [found(query, asked["topk"]) for query in asked["queries"]]
        body = json.dumps({"result": hits}).encode()
        if plan.isdecimal():
            self._send(int(plan), b'{"error": "as told"}')
        elif plan == "ok":
            self._send(200, body)
        elif plan in ("garbage", "shape"):
            self._send(200, b'{"result": [[{"docu' if plan == "garbage" else b'{"result": [[3]]}')
        else:
            self._break(plan, body)

    def _send(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _break(self, plan: str, body: bytes) -> None:
        self.close_connection = True
        if plan == "hang":
            self.server.released.wait(HANG_SECONDS)
        elif plan == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif plan == "cut":
            self._send(200, body[:20], len(body))
        elif plan != "close":
            raise AssertionError(plan)
