"""An HTTP address on this machine, at which agents in other processes reach the policy."""

from __future__ import annotations

import hmac
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..threads import DaemonThread
from .openai_wire import RETRIES, Answers, RefusedRequest, http

# Bytes of a request.
MAX_BODY = 16 * 2**20
POLL_SECONDS = 0.1


class AgentEndpoint:
    """HTTP server that answers requests whose API key is the secret of a running episode."""

    def __init__(self) -> None:
        self._sessions: dict[str, Answers] = {}
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with suppress(ConnectionError):
                    super().handle()

            def do_POST(self) -> None:
                endpoint.handle(self)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                """Suppress the log line of a request."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}/v1"
        DaemonThread(self._server.serve_forever, "agent-endpoint", POLL_SECONDS).start()

    def open(self, session: Any) -> None:
        """Accept requests with the secret of an episode."""
        self._sessions[session.key] = session.answers

    def close(self, session: Any) -> None:
        """Reject requests with the secret of an episode from now on."""
        self._sessions.pop(session.key, None)

    def stop(self) -> None:
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one HTTP request."""
        headers, content = request.headers, b""
        length = headers.get("Transfer-Encoding") or headers.get("Content-Length") or "0"
        try:
            answers = self._answers_of(headers.get("Authorization") or "")
            if not length.isdecimal() or int(length) > MAX_BODY:
                raise RefusedRequest(413, f"Content-Length is {length}; allowed: {MAX_BODY}.")
            content = request.rfile.read(int(length))
            repeats = headers.get(RETRIES, "0") != "0"
            response = answers.begin(request.command, request.path, content, repeats).result()
        except RefusedRequest as refused:
            # The body is not read, so the connection cannot be used again.
            request.close_connection = True
            response = refused.response
        status, kind, body = http(response, content)
        request.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def _answers_of(self, header: str) -> Answers:
        """Return the answers of the episode whose secret the header holds, by constant-time comparisons."""
        found = None
        for key, answers in list(self._sessions.items()):
            if hmac.compare_digest(f"Bearer {key}".encode(), header.encode()):
                found = answers
        if found is None:
            raise RefusedRequest(401, "The API key is not that of a running episode.")
        return found
