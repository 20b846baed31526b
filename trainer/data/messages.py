"""Messages in the OpenAI format -> what a `Prompt` has of them, checked and written as a server reads them.

vLLM hands messages to the chat template with texts for lists of text parts, with the arguments of a call as
an object, and with reasoning under two names; so do we, else the ids would be others. Gives up: pictures and
sounds, two users in a row, and answers that go on without the result of their call.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

from trainer.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning", "reasoning_content")  # what servers and templates call it
READ = {"user": ("content",), "system": ("content",), "developer": ("content",),
        "tool": ("content", "tool_call_id", "name"),
        "assistant": ("content", "tool_calls", *REASONING)}
TOOL = ("name", "description", "parameters", "strict")  # in the order of a server


def conversation(messages: Any, where: str) -> tuple[str | None, list[str], list[str], tuple[Message, ...]]:
    """System text, turns, given answers, and the messages themselves where these three leave something out.
    A turn is the text that stands before an answer. Raises UserError for what is no conversation."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and a text "content"')
    read = [_message(each, f"{where}: message {number}", where) for number, each in enumerate(messages, 1)]
    first = read[0] if read and read[0]["role"] in ("system", "developer") else None
    rest = read[1:] if first else read
    _require_turns(rest, where)
    turns: list[str] = []
    for before, message in zip([None, *rest], rest, strict=False):
        if message["role"] == "user" or (message["role"] == "tool" and before["role"] != "tool"):
            turns.append(message["content"])
        elif message["role"] == "tool":
            turns[-1] += "\n" + message["content"]
    answers = [message["content"] for message in rest if message["role"] == "assistant"]
    plain = all(set(message) == {"role", "content"} for message in read) and \
        (first is None or first["role"] == "system") and all(each["role"] != "tool" for each in rest)
    if not plain and not all(each["content"].strip() for each in rest if each["role"] == "user"):
        raise UserError(f"{where}: a message of the user is empty; write what was asked")
    return first["content"] if first else None, turns, answers, () if plain else tuple(read)


def unread(messages: list[Message]) -> set[str]:
    """The keys in messages that mean nothing here."""
    return {f"messages.{name}" for message in messages for name, value in message.items()
            if value is not None and name not in ("role", *READ[message["role"]])}


def tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Definitions of functions, bare or in their envelope, as a list or as its JSON."""
    if isinstance(value, str):
        value = _json(value, f'{where}: "tools"')
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UserError(f'{where}: "tools" must be a list of definitions of functions, found '
                        f"{reprlib.repr(value)}")
    found = []
    for each in value:
        function = each.get("function", each)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) \
                or each.get("type", "function") != "function":
            raise UserError(f'{where}: "tools" has {reprlib.repr(each)}, which is no function with a "name"')
        named = {key: function.get(key) for key in TOOL}
        if named["strict"] is None:
            del named["strict"]
        found.append({"type": "function", "function": named})
    return found


def _message(given: Message, place: str, where: str) -> Message:
    """One message, of its role and content and what else of it a template may read."""
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and a text "content"')
    if role not in ROLES:
        raise UserError(f"{place} has role {role!r}, expected one of {', '.join(ROLES)}")
    read: Message = {"role": role, "content": _content(content, place, where)}
    if role == "tool":
        read |= {key: given[key] for key in ("tool_call_id", "name") if isinstance(given.get(key), str)}
    if role != "assistant":
        if content is None:
            raise UserError(f'{place} has role {role!r} and no "content"')
        return read
    reasoning = next((given[key] for key in REASONING if given.get(key) is not None), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise UserError(f"{place} has reasoning that is no text: {reprlib.repr(reasoning)}")
    if reasoning:
        read |= dict.fromkeys(REASONING, reasoning)
    if given.get("tool_calls"):
        read["tool_calls"] = _calls(given["tool_calls"], place)
    if content is None and len(read) == 2:
        raise UserError(f'{place} is an answer without "content" and without calls')
    return read


def _content(content: Any, place: str, where: str) -> str:
    """The text of a message; parts are joined as a server joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and a text "content"')
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{place} has a part of type {part.get('type')!r}; only texts can be read")
    return "\n".join(part["text"] for part in content)


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    """Calls of functions, their arguments as an object."""
    calls: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f'{place} has a call that is no function with a "name": {reprlib.repr(call)}')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{place}, call of {function['name']}, \"arguments\"")
        if not isinstance(arguments, dict):
            raise UserError(f"{place}, call of {function['name']}: \"arguments\" must be an object, found "
                            f"{reprlib.repr(arguments)}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        if named and any(each.get("id") == call["id"] for each in calls):
            raise UserError(f"{place} has two calls with the id {call['id']!r}; each needs its own")
        calls.append({**named, "type": "function",
                      "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _require_turns(rest: list[Message], where: str) -> None:
    """Raises unless user and assistant alternate, and each call has its result before the next answer."""
    waiting: list[str | None] = []  # ids of calls without a result yet
    expected = "user"
    for number, message in enumerate(rest, 1):
        role = message["role"]
        if waiting and role == "tool":
            name = message.get("tool_call_id")
            if name is not None and None not in waiting and name not in waiting:
                raise UserError(f"{where}: message {number} is the result of the call {name!r}, which no "
                                "answer before it makes")
            waiting.remove(name if name in waiting else waiting[0])
            expected = "tool" if waiting else "assistant"
            continue
        if waiting:
            raise UserError(f"{where}: message {number} has role {role!r}, but {len(waiting)} calls of the "
                            "answer before it have no result; give a tool message for each")
        if role != expected:
            raise UserError(f"{where}: message {number} has role {role!r}, expected {expected!r}; user and "
                            "assistant must alternate")
        if role == "assistant":
            waiting = [call.get("id") for call in message.get("tool_calls", ())]
        expected = "assistant" if role == "user" else "user"


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is no JSON, found {reprlib.repr(text)}; close what is open, or write an "
                        "object") from error
