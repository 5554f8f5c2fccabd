"""A model hub on this machine: as much of the hub's protocol as ``snapshot_download`` speaks, for one model folder."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = "/api/models/"


class HubServer(ThreadingHTTPServer):
    """Serves ``folder`` as the repository ``model``.

    Attributes:
        break_after: bytes of the weights after which every download of them breaks off; None: none does.
        hang_on: prefix of the paths that are never answered.
        requests: ``(method, path, Range header)`` of every request.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.model = folder, model
        self.break_after: int | None = None
        self.hang_on: str | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> list[str | None]:
        """Range headers of the downloads of the file ``name``."""
        return [part for method, path, part in self.requests if method == "GET" and path.endswith(f"/{name}")]

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self.shutdown()
            self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.hang_on is not None and path.startswith(hub.hang_on):
            while not hub.closing.is_set():
                time.sleep(0.02)
            self.close_connection = True
        elif path in (f"{API}{hub.model}", f"{API}{hub.model}/revision/main", f"{API}{hub.model}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.names()]
            self.send_json({"id": hub.model, "modelId": hub.model, "sha": COMMIT, "siblings": siblings,
                            "private": False, "tags": [], "downloads": 0, "likes": 0})
        elif path == f"{API}{hub.model}/tree/{COMMIT}":
            self.send_json([{"type": "file", "path": name, "size": len(self.content(name)), "oid": self.etag(name)}
                            for name in self.names()])
        elif path.startswith(f"/{hub.model}/resolve/") and (name := path.rsplit("/", 1)[1]) in self.names():
            self.send_file(name)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def names(self) -> list[str]:
        return sorted(path.name for path in self.server.folder.iterdir())

    def content(self, name: str) -> bytes:
        return (self.server.folder / name).read_bytes()

    def etag(self, name: str) -> str:
        return hashlib.sha256(self.content(name)).hexdigest()

    def send_file(self, name: str) -> None:
        content = self.content(name)
        headers = {"ETag": f'"{self.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, size = 200, len(content)
        if asked := self.headers.get("Range"):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {first}-{size - 1}/{size}"
            content = content[first:]
        if self.server.break_after is not None and name.endswith(".safetensors") and self.command == "GET":
            self.send(status, content[: self.server.break_after], headers, length=len(content))
            self.close_connection = True
        else:
            self.send(status, content, headers)

    def send_json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass
