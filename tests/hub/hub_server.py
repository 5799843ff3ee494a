"""The part of the Hub's API that `huggingface_hub` uses, on this machine, with faults on request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_" + "Local0" * 5


@dataclass
class Repo:
    """One repository: commits by id, each a whole tree of path -> content."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """The newest tree."""
        return self.commits[self.branches["main"]]

    def commit(self, files: dict[str, bytes], message: str, branch: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{message}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def tree(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = self.branches.get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else None


class LocalHub:
    """A server with repositories and faults: statuses for requests whose line ("POST /api/...") matches."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, int] = {}
        self.before: Callable[[str], None] = lambda line: None
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, pattern: str, status: int) -> None:
        """Let requests go wrong from now on."""
        self.faults[pattern] = status

    def fault(self, line: str) -> int | None:
        return next((status for pattern, status in self.faults.items() if re.search(pattern, line)), None)


def oid(content: bytes | None) -> str | None:
    """The id of a file, as a blob in git."""
    return None if content is None else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: LocalHub

    def log_message(self, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlparse(self.path).path)
        line = f"{self.command} {path}"
        self.hub.before(line)
        body = self._body()
        if (status := self.hub.fault(line)) is not None:
            return self._answer(status, {"error": f"injected {status}"})
        with self.hub.lock:
            self._route(path, body)

    do_GET = do_HEAD = do_POST = _serve

    def _body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(
        self, status: int, body: bytes | dict | list = b"", headers: dict[str, str] | None = None
    ) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _route(self, path: str, body: bytes) -> None:
        authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        writes = self.command == "POST" and not path.startswith("/api/validate")
        if writes and not authorised:
            return self._answer(401, {"error": "Invalid username or password."})
        routes = (
            (r"GET /api/whoami-v2", self._whoami),
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", lambda: self._answer(200, {"errors": [], "warnings": []})),
            (r"POST /api/models/(.+?)/preupload/(.+)", self._preupload),
            (r"POST /api/models/(.+?)/commit/(.+)", self._commit),
            (r"GET /api/models/(.+?)/tree/([^/]+)", self._tree),
            (r"GET /api/models/(.+?)/revision/(.+)", self._info),
            (r"GET /api/models/([^/]+/[^/]+)", self._info),
            (r"(?:GET|HEAD) /(.+?/.+?)/resolve/([^/]+)/(.+)", self._resolve),
        )
        self._content = body
        for pattern, serve in routes:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                return serve(*found.groups())
        self._refuse(404, "NoRoute")

    def _whoami(self) -> None:
        auth = {"accessToken": {"role": "write"}}
        self._answer(200, {"type": "user", "name": "me", "auth": auth})

    def _create(self) -> None:
        asked = json.loads(self._content)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        exists = name in self.hub.repos
        if not exists:
            self.hub.repos[name] = Repo()
            self.hub.repos[name].commit({".gitattributes": b"*.bin lfs\n"}, "initial commit")
        url = {"url": f"{self.hub.url}/{name}", "name": name}
        self._answer(409 if exists else 200, {**url, "error": "You already created this repo"})

    def _preupload(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        files = []
        for asked in json.loads(self._content)["files"]:
            known = {"oid": oid(repo.files.get(asked["path"])), "shouldIgnore": False}
            files.append({"path": asked["path"], "uploadMode": "regular", **known})
        self._answer(200, {"files": files})

    def _commit(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        files, summary = dict(repo.files), ""
        for line in self._content.decode().splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                summary = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
        sha = repo.commit(files, summary, revision)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self._answer(200, {"commitOid": sha, "commitUrl": url, "success": True})

    def _info(self, name: str, revision: str = "main") -> None:
        found = self._at(name, revision)
        if found is not None:
            sha, files = found
            listed = [{"rfilename": path} for path in files]
            about = {"id": name, "modelId": name, "sha": sha, "siblings": listed, "tags": []}
            card = {"license": "mit"} if name == "me/base" else {}
            self._answer(200, {**about, "private": False, "downloads": 0, "cardData": card})

    def _tree(self, name: str, revision: str) -> None:
        found = self._at(name, revision)
        if found is not None:
            files = sorted(found[1].items())
            kept = [{"path": path, "size": len(data), "oid": oid(data)} for path, data in files]
            self._answer(200, [{"type": "file", **entry} for entry in kept])

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._at(name, revision)
        if found is None:
            return
        sha, files = found
        head = {"X-Repo-Commit": sha}
        if path not in files:
            code = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self._answer(404, b"", {**head, **code})
        content = files[path]
        self._answer(200, content, {**head, "ETag": f'"{oid(content)}"'})

    def _repo(self, name: str) -> Repo | None:
        if name not in self.hub.repos:
            self._refuse(404, "RepoNotFound")
        return self.hub.repos.get(name)

    def _at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self._repo(name)
        found = None if repo is None else repo.tree(revision)
        if repo is not None and found is None:
            self._refuse(404, "RevisionNotFound")
        return found
