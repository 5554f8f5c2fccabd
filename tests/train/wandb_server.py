"""As much of a W&B server, on loopback, as its client needs to start, to log, to resume and to finish a run."""

from __future__ import annotations

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Remembers one run.

    Attributes:
        history: the last row of every step that has arrived, without W&B's own keys.
        rows: how many rows arrived for each step.
        config: what the run was started with.
        uploads: the files of its artifact, by their paths in it.
        artifacts: names of those that are whole.
    """

    def __init__(self) -> None:
        self.history: dict[int, dict[str, Any]] = {}
        self.rows: dict[int, int] = {}
        self.config: dict[str, Any] = {}
        self.uploads: dict[str, bytes] = {}
        self.artifacts: list[str] = []
        self.answers = threading.Event()  # cleared: requests wait for ever
        self.answers.set()
        remember = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                body = self._body()
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                remember.answers.wait()
                if self.path.endswith("/graphql"):
                    self._reply({"data": remember.graphql(json.loads(body))})
                else:
                    if self.path.endswith("/file_stream"):  # the other one is W&B's own telemetry
                        remember.receive(json.loads(body))
                    self._reply({"exitcode": None, "limits": {}})

            def do_PUT(self) -> None:
                remember.uploads[self.path.removeprefix("/upload/")] = self._body()
                self._reply({})

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def _reply(self, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        match = re.search(r"(?:query|mutation) (\w+)", request["query"])
        operation = match[1] if match else ""
        project = {"id": "p", "name": "specvocab", "entity": {"id": "e", "name": "me"}}
        if operation == "RunResumeStatus" and self.history:
            last = json.dumps([json.dumps({"_step": max(self.history)})])
            bucket = {"id": "b", "name": request["variables"]["name"], "historyLineCount": len(self.history),
                      "eventsLineCount": 0, "logLineCount": 0, "historyTail": last, "eventsTail": "[]", "tags": [],
                      "summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}', "displayName": "run"}
            return {"model": {**project, "bucket": bucket}}
        if operation == "Viewer":
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}",
                               "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            self.config = json.loads(request["variables"].get("config") or "{}") or self.config
            bucket = {"id": "b", "name": request["variables"]["name"], "displayName": "run", "config": "{}",
                      "project": project, "historyLineCount": len(self.history)}
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return self._of_artifact(operation, request.get("variables", {}))

    def _of_artifact(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Upload addresses for what the client wants to send, and what it asks about the result."""
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "CreateArtifact":
            self.creating = variables["input"]["artifactCollectionName"]
            return {"createArtifact": {"artifact": {"id": "a", "state": "PENDING",
                                                    "artifactSequence": {"id": "s", "latestArtifact": None}}}}
        if operation == "CreateArtifactManifest":
            file = {"id": "f", "uploadUrl": f"{self.url}/upload/manifest", "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
        if operation == "CreateArtifactFiles":
            edges = [{"node": {"id": "f", "name": one["name"], "displayName": one["name"], "storagePath": one["name"],
                               "uploadUrl": f"{self.url}/upload/{one['name']}", "uploadHeaders": [],
                               "uploadMultipartUrls": None, "artifact": {"id": "a"}}}
                     for one in variables["input"]["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "CommitArtifact":
            self.artifacts.append(self.creating)
            return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
        if operation == "ArtifactByID":
            return {"artifact": {"__typename": "Artifact", "id": "a", "artifactType": {"name": "model"}, "tags": [],
                                 "artifactSequence": {"name": self.creating, "project": None}, "state": "COMMITTED",
                                 "versionIndex": 0, "description": None, "metadata": None, "historyStep": None,
                                 "ttlDurationSeconds": 0, "ttlIsInherited": False, "size": 0, "digest": "d",
                                 "commitHash": None, "fileCount": 0, "createdAt": "", "updatedAt": None}}
        return {}

    def receive(self, stream: dict[str, Any]) -> None:
        """A piece of the run's file stream."""
        for line in stream.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
            row = json.loads(line)
            step = row["_step"]
            self.rows[step] = self.rows.get(step, 0) + 1
            self.history[step] = {key: value for key, value in row.items() if not key.startswith("_")}

    def forget_after(self, step: int) -> None:
        """As if later rows had never arrived."""
        self.history = {at: row for at, row in self.history.items() if at <= step}
        self.rows = {at: count for at, count in self.rows.items() if at <= step}

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()
