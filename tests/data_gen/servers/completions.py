"""A completions server around a real tiny model, in a process of its own, where no vLLM is installed.

    python -m tests.data_gen.servers.completions FOLDER    # prints its port when it is ready

It speaks the fields that vLLM documents for ``POST /v1/completions`` with ``return_token_ids``. Every request runs
alone through transformers' ``generate``, which shares no code with the engines of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data_gen.runs import ENVIRONMENT
from tests.forking import forking

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 512


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open, as real servers do

    def do_GET(self) -> None:
        self.send(200, {"object": "list", "data": [{"id": MODEL_NAME, "max_model_len": MAX_MODEL_LEN}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, limit = request["prompt"], request["max_tokens"]
        vocab_size = self.server.model.config.vocab_size
        if request["model"] != MODEL_NAME:
            self.send(404, {"error": {"message": f"The model `{request['model']}` does not exist."}})
        elif len(prompt) + limit > MAX_MODEL_LEN:
            self.send(400, {"error": {"message": f"maximum context length is {MAX_MODEL_LEN} tokens"}})
        elif not all(0 <= token < vocab_size for token in prompt):
            self.send(400, {"error": {"message": "token id out of vocabulary"}})
        else:
            self.send(200, self.complete(request))

    def complete(self, request: dict) -> dict:
        """Its own answer to a request that comes again, which saves the tests time."""
        key = json.dumps(request, sort_keys=True)
        with self.server.one_at_a_time:
            if key not in self.server.answers:
                self.server.answers[key] = self.computed(request)
            return self.server.answers[key]

    def computed(self, request: dict) -> dict:
        prompt, stops = request["prompt"], request["stop_token_ids"]
        sampled = request["temperature"] > 0
        how = {"temperature": request["temperature"], "top_k": max(request["top_k"], 0), "top_p": request["top_p"],
               "repetition_penalty": request["repetition_penalty"]} if sampled else {}
        torch.manual_seed(request.get("seed", 0))
        output = self.server.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=request["max_tokens"], eos_token_id=stops or None, do_sample=sampled, **how)
        ids = output[0, len(prompt):].tolist()
        stopped = ids[-1] in stops
        return {
            "object": "text_completion",
            "model": MODEL_NAME,
            "choices": [{
                "index": 0,
                "text": self.server.tokenizer.decode(ids, skip_special_tokens=True),
                "finish_reason": "stop" if stopped else "length",
                "stop_reason": ids[-1] if stopped else None,
                **({"token_ids": ids, "prompt_token_ids": prompt} if request.get("return_token_ids") else {}),
            }],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }

    def send(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def main(folder: str) -> None:
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.model = AutoModelForCausalLM.from_pretrained(folder).eval()
    server.tokenizer = AutoTokenizer.from_pretrained(folder)
    server.one_at_a_time = threading.Lock()
    server.answers = {}
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def completion_server(folder: Path) -> Iterator[str]:
    """The URL of a server that runs as long as the context."""
    with forking():
        process = subprocess.Popen([sys.executable, "-m", "tests.data_gen.servers.completions", str(folder)],
                                   env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
