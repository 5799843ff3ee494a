"""Serve curves and recorded episodes of runs on this machine, refreshed with every update.

The address is on 127.0.0.1 and needs no network; runs may still be training
(docs/watching.md).

Examples:
    trl-stppo watch runs/demo --open
    trl-stppo watch runs/ppo runs/st-ppo    # side by side
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import webbrowser
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from ..trace.files import FOLDER
from ..trace.page import build_page
from ..watch.runs import OUTCOMES, read_run

HOST = "127.0.0.1"
HTML, JSON = "text/html; charset=utf-8", "application/json"


@dataclass
class WatchedRun:
    """A watched run: its folder, and its page of episodes. New episodes rebuild the page."""

    folder: Path
    page: Path
    lock: Lock = field(default_factory=Lock)
    built: str = ""

    def version(self) -> str:
        """Return a fingerprint that changes when new episodes are recorded."""
        found = [path.stat() for path in sorted((self.folder / FOLDER).glob("*.jsonl.gz"))]
        return f"{len(found)}-{max((stat.st_mtime_ns for stat in found), default=0)}"

    def state(self) -> dict[str, Any]:
        """Return the run's curves and the version of its episodes, as data for the browser."""
        state: dict[str, Any] = {"name": self.folder.resolve().name, "panels": {}}
        state["episodes"] = self.version()
        try:
            run = read_run(self.folder)
        except (FileNotFoundError, ValueError):
            return state
        panels = {
            panel.title: {
                "train": list(zip(*run.points(panel.metric), strict=True)),
                "eval": list(zip(*run.points(f"eval_{panel.metric}"), strict=True)),
                "unit": panel.unit,
                "limits": panel.limits,
                "falls": sorted(run.falls()) if panel in OUTCOMES else [],
            }
            for panel in run.panels()
        }
        resumed = [step / run.steps_per_rollout for step in run.resumed]
        return state | {"resumed": resumed, "panels": panels}

    def episodes(self) -> bytes:
        """Return the HTML page of the episodes. The page is rebuilt if there are new episodes."""
        with self.lock:
            version = self.version()
            if version != self.built:
                build_page(self.folder, self.page)
                self.built = version
            return self.page.read_bytes()


def server(folders: list[Path], pages: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server that builds the runs' pages in the folder `pages`. The caller starts the server."""
    runs = [WatchedRun(folder, pages / f"{i}.html") for i, folder in enumerate(folders)]
    shell = (Path(__file__).parents[1] / "watch" / "template" / "watch.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name, _, number = path.strip("/").partition("/")
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                # Refuse other host names, because another site's name may resolve to this address.
                self.send_error(403)
            elif path == "/":
                self._answer(shell, HTML)
            elif path == "/state":
                self._answer(json.dumps([run.state() for run in runs]).encode(), JSON)
            elif name == "episodes" and number in map(str, range(len(runs))):
                try:
                    self._answer(runs[int(number)].episodes(), HTML)
                except (OSError, ValueError) as error:
                    self.send_error(404, explain=str(error))
            else:
                self.send_error(404)

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Suppress the line that the server prints per request."""

    return ThreadingHTTPServer((HOST, port), Handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `watch` to the parser."""
    about = "output_dir of a run, also before it begins"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    parser.add_argument("--port", type=int, default=8321, help="default 8321; 0 for a free one")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Serve the pages of the runs until Ctrl-C; return the exit code."""
    with tempfile.TemporaryDirectory() as pages:
        try:
            served = server(options.runs, Path(pages), options.port)
        except OSError as error:
            raise OSError(f"`--port {options.port}` cannot be used: {error}.") from error
        address = f"http://{HOST}:{served.server_address[1]}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if options.open:
            webbrowser.open(address)
        with served, contextlib.suppress(KeyboardInterrupt):
            served.serve_forever()
    return 0
