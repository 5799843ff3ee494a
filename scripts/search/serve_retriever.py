"""Serve a local retriever over HTTP, in the form of Search-R1's server.

    python scripts/search/serve_retriever.py --index indexes/wiki --port 8000
    python scripts/search/serve_retriever.py --dense indexes/wiki-e5
    python scripts/search/serve_retriever.py --corpus corpus.jsonl
    python scripts/search/serve_retriever.py --stdlib --port 0

POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true}; GET /health. Port 0 takes a
free one; the address is printed. Ctrl-C or SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from search_env.retrieval import Passage, open_retriever
from search_index import BM25Index, DenseIndex, build_bm25, read_corpus

MAX_BODY, MAX_TOPK, DEFAULT_TOPK = 16 * 2**20, 1000, 3


class RetrievalServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own.

    Args:
        address: host and port.
        retriever: has `ranked(query, top_k)`, thread-safe.
    """

    daemon_threads = True
    request_queue_size = 1024  # a rollout's environments connect all at once

    def __init__(self, address: tuple[str, int], retriever: Any) -> None:
        super().__init__(address, Handler)
        self.retriever = retriever


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RetrievalServer
    protocol_version = "HTTP/1.1"
    timeout = 300  # of an idle connection
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent: training asks thousands of times a minute."""

    def handle(self) -> None:
        """Serve the connection; a client that has gone is no news."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Say that the index is open."""
        known = self.path.rstrip("/") in ("", "/health")
        self._reply(200 if known else 404, {"status": "ok"} if known else {"error": self.path})

    def do_POST(self) -> None:
        """Search."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            # The rest of a body that is not read would be taken for the next request.
            self.close_connection = True
            self._reply(400, {"error": f"Content-Length is {length!r}; allowed: up to {MAX_BODY}"})
            return
        body = self.rfile.read(int(length))
        if self.path.rstrip("/") != "/retrieve":
            self._reply(404, {"error": f"there is no {self.path}; POST /retrieve"})
            return
        try:
            queries, top_k, scores = checked(body)
        except (ValueError, TypeError, RecursionError) as error:
            self._reply(400, {"error": f"{type(error).__name__}: {error}"})
            return
        try:
            answer = [self._documents(query, top_k, scores) for query in queries]
        except Exception as error:
            traceback.print_exc()
            self._reply(500, {"error": f"{type(error).__name__}: {error}"})
            return
        self._reply(200, {"result": answer})

    def _documents(self, query: str, top_k: int, scores: bool) -> list[Any]:
        ranked = self.server.retriever.ranked(query, top_k) if query.strip() else []
        if scores:
            return [{"document": document(passage), "score": score} for passage, score in ranked]
        return [document(passage) for passage, _ in ranked]

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def checked(body: bytes) -> tuple[list[str], int, bool]:
    """Queries, topk and return_scores of a request.

    Raises:
        ValueError, TypeError, RecursionError: one of them is not what it should be.
    """
    request = dict(json.loads(body))
    queries, top_k = request.get("queries"), request.get("topk") or DEFAULT_TOPK
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("queries has to be a list of strings")
    if type(top_k) is not int or not 1 <= top_k <= MAX_TOPK:
        raise ValueError(f"topk is {top_k!r}; allowed are 1 to {MAX_TOPK}")
    return queries, top_k, bool(request.get("return_scores"))


def document(passage: Passage) -> dict[str, str]:
    """A passage in the form of Search-R1's corpus, in which the first line is the title."""
    return {"contents": f'"{" ".join(passage.title.split())}"\n{passage.text}'}


def retriever_of(args: argparse.Namespace, scratch: ExitStack) -> Any:
    """The retriever that the flags name.

    Args:
        args: the flags.
        scratch: removes what a corpus takes on disk.
    """
    if args.corpus:
        folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="retriever-")))
        build_bm25((p for path in args.corpus for p in read_corpus(path)), folder / "index")
        return BM25Index(folder / "index")
    if args.stdlib:
        return open_retriever("stdlib")
    return BM25Index(args.index) if args.index else DenseIndex(args.dense)


def parse_args() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--index", metavar="DIR", help="a BM25 index of build_index.py")
    source.add_argument("--dense", metavar="DIR", help="a dense index of build_index.py")
    source.add_argument(
        "--corpus", metavar="FILE", nargs="+", help="JSONL, indexed as build_index.py bm25 does"
    )
    source.add_argument("--stdlib", action="store_true", help="Python's own documentation")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for every interface")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    return parser.parse_args()


def main() -> None:
    """Serve what the flags name."""
    args = parse_args()
    with ExitStack() as scratch:
        try:
            server = RetrievalServer((args.host, args.port), retriever_of(args, scratch))
        except (OSError, OverflowError, ValueError, ImportError) as error:
            sys.exit(f"serve_retriever: {error}")
        # Both remove what a corpus takes on disk; a shell's background job ignores SIGINT otherwise.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        host, port = server.server_address[:2]
        print(f"listening on http://{host!s}:{port}/retrieve", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
