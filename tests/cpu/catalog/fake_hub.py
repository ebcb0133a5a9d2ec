"""A stand-in of the hub's HTTP interface on loopback: listings, ranges, redirects to storage, and
the faults a network has. Counts the bytes it sends."""

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "c" * 40
    revisions: tuple[str, ...] = ("main",)
    token: str = ""
    gated: bool = False
    large: int = 1000
    """Files from this size on are stored apart and named by SHA-256."""

    def etag(self, name: str) -> str:
        data = self.files[name]
        if len(data) >= self.large:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@dataclass
class Faults:
    """Each takes effect as often as its count says."""

    break_after: dict[str, list[int]] = field(default_factory=dict)
    """Per file: end the connection after so many bytes of body, one entry per request."""
    status: list[int] = field(default_factory=list)
    """Answer the next requests with these."""
    no_ranges: bool = False
    damage: bool = False


class FakeHub:
    def __init__(self, **repos: Repo) -> None:
        self.repos = {name.replace("__", "/"): repo for name, repo in repos.items()}
        self.faults = Faults()
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self.storage_tokens: list[str | None] = []
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.storage_url = f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server_state
        path = urlsplit(self.path).path
        hub.requests.append(path)
        if hub.faults.status:
            self._plain(hub.faults.status.pop(0), {"Retry-After": "3"})
            return
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "storage":
            hub.storage_tokens.append(self.headers.get("Authorization"))
            self._content(hub.repos["/".join(parts[1:3])], "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self._listing("/".join(parts[2:4]), parts[4:])
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _repo(self, name: str, revision: str) -> Repo | None:
        repo = self.server_state.repos.get(name)
        if repo is None:
            self._plain(404, {"X-Error-Code": "RepoNotFound"})
            return None
        allowed = not repo.token or self.headers.get("Authorization") == f"Bearer {repo.token}"
        if not allowed:
            headers = {"X-Error-Code": "GatedRepo"} if repo.gated else {}
            self._plain(403 if repo.gated else 401, headers)
            return None
        if revision not in (repo.commit, *repo.revisions):
            self._plain(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo

    def _listing(self, name: str, rest: list[str]) -> None:
        repo = self._repo(name, rest[1])
        if repo is None:
            return
        siblings: list[dict[str, Any]] = []
        for file, data in repo.files.items():
            one: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": "0" * 40}
            if len(data) >= repo.large:
                one["lfs"] = {"sha256": repo.etag(file), "size": len(data), "pointerSize": 134}
            else:
                one["blobId"] = repo.etag(file)
            siblings.append(one)
        body = json.dumps({"id": name, "sha": repo.commit, "siblings": siblings}).encode()
        self._plain(200, {"Content-Type": "application/json"}, body)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        if file not in repo.files:
            self._plain(404, {"X-Error-Code": "EntryNotFound"})
        elif len(repo.files[file]) >= repo.large:
            hub = self.server_state
            headers = {
                "Location": f"{hub.storage_url}/storage/{name}/{file}",
                "X-Repo-Commit": repo.commit,
                "X-Linked-Etag": f'"{repo.etag(file)}"',
                "X-Linked-Size": str(len(repo.files[file])),
            }
            self._plain(302, headers)
        else:
            self._content(repo, file)

    def _content(self, repo: Repo, file: str) -> None:
        hub = self.server_state
        data = repo.files[file]
        if hub.faults.damage:
            data = bytes(len(data))
        start = 0
        wanted = self.headers.get("Range")
        if wanted and not hub.faults.no_ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{repo.etag(file)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        body = data[start:]
        breaks = hub.faults.break_after.get(file)
        if breaks:
            body = body[: breaks.pop(0)]
            self.close_connection = True
        hub.sent[file] += len(body)
        self.wfile.write(body)

    def _plain(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
