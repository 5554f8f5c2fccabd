"""A proxy that spoils what a server answers, one fault after another."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HANG_S = 30.0


def _changed(**changes) -> Callable[[dict, dict], dict]:
    return lambda answer, choice: answer | {"choices": [choice | changes]}


ANSWERS: dict[str, Callable[[dict, dict], dict]] = {  # of (answer, its choice), spoilt
    "fewer ids": lambda answer, choice: _changed(token_ids=choice["token_ids"][:-1])(answer, choice),
    "no choice": lambda answer, choice: answer | {"choices": []},
    "no usage": lambda answer, choice: {key: value for key, value in answer.items() if key != "usage"},
    "no list": _changed(token_ids="12"),
    "truth values": lambda answer, choice: _changed(token_ids=[True for _ in choice["token_ids"]])(answer, choice),
    "usage of null": lambda answer, choice: answer | {"usage": None},
    "id outside the vocabulary": lambda answer, choice: _changed(
        token_ids=[10**6, *choice["token_ids"][1:]])(answer, choice),
    "another prompt": _changed(prompt_token_ids=[1, 2, 3]),
    "other reason": lambda answer, choice: _changed(
        finish_reason={"stop": "length", "length": "stop"}[choice["finish_reason"]])(answer, choice),
    "abort": _changed(finish_reason="abort"),
}
# An honest answer in another dress: the stop token named instead of written.
STRIPPED = "stripped stop token"
BREAKAGES = ("408", "429", "500", "502", "503", "hang", "close", "no json")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.stopping.is_set():  # a connection from before
            self.close_connection = True
        else:
            self.send(*self.forwarded())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.stopping.is_set():
            self.close_connection = True
            return
        with self.server.counted(json.loads(body)["prompt"]) as fault:
            self.answer(body, fault)

    def answer(self, body: bytes, fault: str | None) -> None:
        if fault in ("408", "429", "500", "502", "503"):
            self.send(int(fault), b"spoilt", {"Retry-After": "0"} if fault in ("429", "503") else {})
        elif fault == "hang":
            self.server.stopping.wait(HANG_S)
            self.close_connection = True
        elif fault == "close":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif fault == "no json":
            self.send(200, b"<html>")
        else:
            self.send(*self.spoilt(*self.forwarded(body), fault))

    def spoilt(self, status: int, body: bytes, fault: str | None) -> tuple[int, bytes]:
        if fault is None or status != 200:
            return status, body
        answer = json.loads(body)
        choice = answer["choices"][0]
        if fault == STRIPPED:
            if choice["finish_reason"] == "stop":
                choice["token_ids"].pop()
                answer["usage"]["completion_tokens"] -= 1
        elif fault == "no ids":
            del choice["token_ids"]
        else:
            answer = ANSWERS[fault](answer, choice)
        return 200, json.dumps(answer).encode()

    def forwarded(self, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address) -> None:
        pass  # the other side closed the connection, which is what these tests are about


class FaultyProxy:
    """Forwards to ``upstream``; the n-th completion that is asked for meets the n-th of ``faults``, None for none.

    What ``poison`` says of a prompt comes before that.
    """

    def __init__(self, upstream: str, faults: Iterable[str | None] = (), *, port: int = 0,
                 poison: Callable[[list[int]], str | None] = lambda prompt: None) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults = iter(faults)
        self.poison = poison
        self.num_asked = self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self.port = port or free_port()
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FaultyProxy:
        self._server = _Server(("127.0.0.1", self.port), Handler)
        self._server.upstream, self._server.counted = self.upstream, self._counted
        self._server.stopping = threading.Event()
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._server.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def die_and_come_back(self, *, after: int, away_s: float) -> None:
        """Stop once ``after`` completions have been asked for, and start again later."""
        def run() -> None:
            while self.num_asked < after:
                time.sleep(0.005)
            self.stop()
            time.sleep(away_s)
            self.start()
        threading.Thread(target=run, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self.start()

    def __exit__(self, *exc_info) -> None:
        self.stop()

    @contextmanager
    def _counted(self, prompt: list[int]) -> Iterator[str | None]:
        with self._lock:
            self.num_asked += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            fault = self.poison(prompt) or next(self.faults, None)
        try:
            yield fault
        finally:
            with self._lock:
                self.in_flight -= 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
