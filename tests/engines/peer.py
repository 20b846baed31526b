"""A small HTTP server in the place of a vLLM server, which can be told to misbehave.

What it gives as the state of token t after layer L is `value(t, L)`, so a test knows every number. Run as a
script with the arguments of `vllm serve`, it is a process that can be started and killed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LAYERS, VOCABULARY = 4, 3, 50
DEADLY = 49  # a program that answers a prompt with it ends
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
          "max_position_embeddings": 4096}
Body = dict[str, Any]


def value(token: int, layer: int) -> float:
    return token + layer / 8


def states_of(tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[tokens, layers, HIDDEN] float32."""
    ids, after = torch.tensor(tokens), torch.tensor(layers)
    return (ids[:, None, None] + after[None, :, None] / 8).expand(-1, -1, HIDDEN).contiguous().float()


def crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy())


class Peer:
    """`act(number, body)` is asked before request `number` (from 0) is answered: it may sleep, and returns
    None for the right answer, a status code, "drop" to break the connection in the middle of the answer, or
    the text of an answer. `change(answer)` and `spoil(path)` change answer and file in place; `late` writes
    the file so many seconds after the answer."""

    def __init__(self, folder: Path, layers: Sequence[int] = (1, 2, 3), max_model_len: int = 65,
                 name: str = "target", root: str = "elsewhere", port: int = 0) -> None:
        self.folder, self.layers, self.name = folder, list(layers), name
        self.models: Any = {"data": [{"id": name, "max_model_len": max_model_len, "root": root}]}
        self.health, self.connector, self.late = 200, True, 0.0
        self.act: Callable[[int, Body], Any] = lambda number, body: None
        self.change: Callable[[Body], Any] = lambda answer: None
        self.spoil: Callable[[Path], Any] = lambda path: None
        self.metrics: Callable[[], str] = lambda: ""
        self.seen: list[Body] = []
        self.names = itertools.count()
        self.now = self.peak = 0
        self.lock = threading.Lock()
        self.http = _Server(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, body: Body) -> Body:
        told = body.get("kv_transfer_params") or {}
        asked = self.connector and told.get("hidden_states")
        answer: Body = {"model": self.name, "choices": [{
            "finish_reason": "length", "prompt_token_ids": body["prompt"],
            "token_ids": [token + 1 for token in body["prompt"]][:body["max_tokens"]]}]}
        if body.get("prompt_logprobs") == 0:
            answer["choices"][0]["prompt_logprobs"] = [None, *(
                {str(token): {"logprob": -float(token), "rank": 1}} for token in body["prompt"][1:])]
        if not asked:
            return answer
        name = f"{told['reader']}{next(self.names):08x}{id(self):016x}.safetensors"
        answer["kv_transfer_params"] = {
            "format": 2, "file": name, "rows": len(body["prompt"]), "layers": self.layers,
            "hidden_size": HIDDEN, "dtype": "float32", "model_layers": LAYERS, "vocabulary": VOCABULARY,
            "max_num_seqs": 1, "prefix_caching": False}
        if self.late:
            threading.Timer(self.late, self.write, (self.folder / name, body["prompt"])).start()
        else:
            self.write(self.folder / name, body["prompt"])
        return answer

    def write(self, path: Path, tokens: list[int]) -> None:
        tensors = {"states": states_of(tokens, self.layers), "tokens": torch.tensor(tokens)}
        described = {"layers": self.layers, "crc32": {name: crc(each) for name, each in tensors.items()}}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, {name: json.dumps(fact) for name, fact in described.items()})
        self.spoil(partial)
        if partial.exists():
            partial.rename(path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *details: object) -> None:
        """A client that has gone is no fault of a peer."""


def _handler(peer: Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *details: object) -> None:
            pass

        def do_GET(self) -> None:
            said = {"/health": (peer.health, {}), "/version": (200, {"version": "0.32.0"}),
                    "/v1/models": (200, peer.models), "/metrics": (200, peer.metrics())}
            self.say(*said[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with peer.lock:
                number = len(peer.seen)
                peer.seen.append(body)
                peer.now += 1
                peer.peak = max(peer.peak, peer.now)
            try:
                told = peer.act(number, body)
                answer = {"error": {"message": "as told"}} if isinstance(told, int) else told
                if told is None:
                    answer = peer.answer(body)
                    peer.change(answer)
            finally:
                with peer.lock:  # before the answer is out: the next request may follow at once
                    peer.now -= 1
            if told == "drop":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                self.close_connection = True
            else:
                self.say(told if isinstance(told, int) else 200, answer)

        def say(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


if __name__ == "__main__":
    told = dict(zip(sys.argv[:-1], sys.argv[1:], strict=True))
    settings = json.loads(told["--kv-transfer-config"])["kv_connector_extra_config"]
    Path(settings["folder"]).mkdir(exist_ok=True)
    with Peer(Path(settings["folder"]), settings["layers"], port=int(told["--port"])) as peer:
        peer.act = lambda number, body: os._exit(1) if DEADLY in body["prompt"] else time.sleep(0.05)
        peer.thread.join()
