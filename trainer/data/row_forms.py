"""Rows in other shapes -> rows with `messages`: ShareGPT `conversations`, and logs of requests to a server.

A log's row is a request as it was sent (`messages` beside `model`, `tools`, ...), one of a batch file
(`custom_id`, `body`), or a pair of `request` and `response`, whose first choice becomes the last answer. An
answer that was cut is left out: what follows it is not what the target would say.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError

Row = dict[str, Any]
SHAPES = ("conversations", "request", "body")
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
            "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool",
            "function_response": "tool", "function_call": "call"}
TAGS = ("id", "category", "language", "split")
OF_A_REQUEST = ("messages", "tools", "chat_template_kwargs")


def plain(row: Any, where: str) -> Any:
    """The row with `turns` or `messages`; one of no known shape comes back as it is."""
    if not isinstance(row, dict):
        return row
    found = [name for name in SHAPES if row.get(name) is not None]
    if not found:
        return row
    for name in ("turns", "messages", *found[1:]):
        if row.get(name) is not None:
            raise UserError(f'{where}: "{found[0]}" stands beside "{name}", which say the same; leave one '
                            "out")
    return _spoken(row, where) if found[0] == "conversations" else _logged(row, where)


def _spoken(row: Row, where: str) -> Row:
    """ShareGPT: `from` and `value` (or role and content), system text and tools beside them."""
    messages = []
    said = row["conversations"]
    if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
        raise UserError(f'{where}: "conversations" must be a list of objects with "from" and "value"')
    if isinstance(row.get("system"), str) and row["system"]:
        messages.append({"role": "system", "content": row["system"]})
    for number, each in enumerate(said, 1):
        speaker, value = each.get("from", each.get("role")), each.get("value", each.get("content"))
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None or not isinstance(value, str):
            raise UserError(f"{where}: message {number} is from {reprlib.repr(speaker)}, saying "
                            f"{reprlib.repr(value)}; expected a text of one of {', '.join(SPEAKERS)}")
        if role == "call":
            messages.append({"role": "assistant", "content": "", "tool_calls": _call(value, where, number)})
        else:
            messages.append({"role": role, "content": value})
    rest = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    return {**rest, "messages": messages, "tools": row.get("tools") or None}


def _call(text: str, where: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: message {number} calls a function by what is no JSON: "
                        f"{reprlib.repr(text)}") from error


def _logged(row: Row, where: str) -> Row:
    request = _inside(row, "request", where) if row.get("request") is not None else row
    if request.get("body") is not None:
        request = _inside(request, "body", where)
    if request.get("messages") is None:
        raise UserError(f'{where}: the request has no "messages", so it is no chat')
    tags = {name: row[name] for name in TAGS if row.get(name) is not None}
    if row.get("custom_id") is not None:
        tags = {"id": row["custom_id"], **tags}
    asked = {name: request[name] for name in OF_A_REQUEST if request.get(name) is not None}
    if row.get("response") is not None and isinstance(asked["messages"], list):
        asked["messages"] = asked["messages"] + _answer(_inside(row, "response", where), where)
    return {**tags, **asked}


def _answer(response: Row, where: str) -> list[Any]:
    """The message that a server answered with; none for one that was cut."""
    status = response.get("status_code", 200)
    body = _inside(response, "body", where) if response.get("body") is not None else response
    choices = body.get("choices")
    if status != 200 or not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UserError(f'{where}: the response has no "choices" (status {status}); leave out what was not '
                        "answered")
    if choices[0].get("finish_reason") == "length":
        return []
    return [choices[0].get("message")]


def _inside(row: Mapping[str, Any], name: str, where: str) -> Row:
    found = row[name]
    if not isinstance(found, dict):
        raise UserError(f'{where}: "{name}" must be an object, found {reprlib.repr(found)}')
    return found
