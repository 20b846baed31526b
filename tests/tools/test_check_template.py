"""`tools/check_template.py` against a small server that tokenises as it is told: what is sent, what is said
of differences. Real servers: tests/vllm/test_template.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from tool_calls import loaded

from trainer.data.chat import Chat
from trainer.data.prompt_rows import parse_object
from trainer.errors import UserError
from trainer.target import Target

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
ROWS = [{"turns": ["one?", "two?"], "answers": ["1", "2"]}, {"turns": ["three?"]},
        {"messages": [{"role": "user", "content": "Rain?"},
                      {"role": "assistant", "content": "", "reasoning": "look", "tool_calls": [CALL]},
                      {"role": "tool", "content": "wet"}], "tools": [{"name": "look"}],
         "chat_template_kwargs": {"mode": "high"}}]


@pytest.fixture(scope="module")
def tool() -> Any:
    return loaded("check_template")


@contextmanager
def listening(answer: Any) -> Iterator[httpx.Client]:
    """A server whose /tokenize answers with status and content of `answer(request)`."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = content.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *details: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
            yield client
    finally:
        server.shutdown()
        server.server_close()


def prompts() -> list[Any]:
    return [parse_object({**row, "id": number}, "row", number)[0] for number, row in enumerate(ROWS)]


def test_every_request_of_a_conversation_is_compared(tool: Any, tiny_target: Target) -> None:
    chat, seen = Chat.of(tiny_target), []

    def tokenise(request: dict[str, Any]) -> tuple[int, str]:
        seen.append(request)
        messages = [{"content": "", **message} for message in request["messages"]]
        ids = chat.render(messages, request["add_generation_prompt"])
        return 200, json.dumps({"tokens": ids})

    with listening(tokenise) as client:
        assert tool.compare(chat, prompts(), client, "target") == (7, [])
    asked = [(len(request["messages"]), request["add_generation_prompt"]) for request in seen]
    assert asked == [(1, True), (3, True), (4, False), (1, True), (1, True), (3, True), (2, False)]
    last = seen[5]
    assert last["chat_template_kwargs"] == {"mode": "high"} and last["tools"][0]["function"]["name"] == "look"
    said = last["messages"][1]
    assert said["reasoning"] == "look" and "reasoning_content" not in said
    assert said["tool_calls"][0]["function"]["arguments"] == '{"at": "sky"}'
    assert tool.masks(chat, prompts()) == {"have one mask": 2}


def test_a_difference_is_shown_where_it_begins(tool: Any, tiny_target: Target) -> None:
    chat = Chat.of(tiny_target)
    other = replace(chat, tokenizer=type(chat.tokenizer).from_pretrained(tiny_target.folder))
    other.tokenizer.chat_template = chat.tokenizer.chat_template.replace("assistant\n", "model\n")

    def tokenise(request: dict[str, Any]) -> tuple[int, str]:
        if request["messages"][0]["content"] == "three?":
            return 400, "too long"
        ids = other.render(request["messages"], request["add_generation_prompt"])
        return 200, json.dumps({"tokens": ids})

    with listening(tokenise) as client:
        compared, found = tool.compare(chat, prompts()[:2], client, "target")
    assert compared == 4 and len(found) == 3, "without a generation prompt nothing differs"
    start = len(chat.render([{"role": "user", "content": "one?"}], generate=False)) + 1
    assert found[0].startswith(f"0, 1 messages: token {start} of {start + 10} here and {start + 6} there: ")
    assert "assist" in found[0] and "model" in found[0]
    assert found[2] == "1, 1 messages: refused, 400: too long"


def test_a_server_of_another_kind_is_one_sentence(tool: Any) -> None:
    with listening(lambda request: (200, "hello")) as client, \
            pytest.raises(UserError, match="does not answer /tokenize .* vLLM itself listens at engine.url"):
        tool.served(client, {})
