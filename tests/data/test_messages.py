"""Conversations with tools and reasoning, ShareGPT, logs of requests: what is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.chat import messages_of
from trainer.data.prompt_rows import parse_all, parse_object
from trainer.data.row_forms import plain
from trainer.errors import UserError
from trainer.records import Prompt

LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
READ_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


def said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def read(row: Any) -> Prompt:
    return parse_object(plain(row, "file, line 1"), "file, line 1", 1)[0]


TALK = [said("system", "Be brief."), said("user", "Rain?"), said("assistant", None, tool_calls=[CALL]),
        said("tool", "wet", tool_call_id="c1"), said("assistant", "Yes", reasoning_content="wet is rain"),
        said("user", "Sure?")]


def test_a_conversation_with_tools_keeps_all_that_a_template_reads() -> None:
    prompt = read({"messages": TALK, "tools": [{"type": "function", "function": LOOK}]})
    assert (prompt.system, prompt.turns) == ("Be brief.", ("Rain?", "wet", "Sure?"))
    assert prompt.answers == ("", "Yes")
    assert prompt.messages[2] == {"role": "assistant", "content": "", "tool_calls": [READ_CALL]}
    assert prompt.messages[4] == {"role": "assistant", "content": "Yes", "reasoning": "wet is rain",
                                  "reasoning_content": "wet is rain"}
    assert prompt.template == {"tools": [{"type": "function", "function": LOOK}]}


def test_plain_messages_are_the_same_prompt_as_turns() -> None:
    assert read({"messages": [said("user", "a"), said("assistant", "b"), said("user", "c")]}) == \
        read({"turns": ["a", "c"], "answers": ["b"]})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [said("user", parts)]}) == read({"turns": ["a\nb"]})


def test_the_target_answers_anew_but_where_a_result_belongs_to_a_call() -> None:
    prompt = read({"messages": TALK})
    assert messages_of(prompt, []) == list(prompt.messages[:2])
    assert messages_of(prompt, ["I guess so"]) == list(prompt.messages[:4])
    assert messages_of(prompt, ["I guess so", "No"]) == [
        *prompt.messages[:4], said("assistant", "No"), prompt.messages[5]]


@pytest.mark.parametrize("tools", [
    [LOOK], [{"function": LOOK}], json.dumps([{"type": "function", "function": LOOK}])])
def test_tools_are_written_as_a_server_writes_them(tools: Any) -> None:
    assert read({"turns": ["a"], "tools": tools}).template == {
        "tools": [{"type": "function", "function": LOOK}]}
    bare = read({"turns": ["a"], "tools": [{"name": "stop"}]}).template["tools"][0]["function"]
    assert list(bare.items()) == [("name", "stop"), ("description", None), ("parameters", None)]


def test_two_calls_at_once_have_their_results_in_any_order() -> None:
    calls = [{**CALL, "id": name} for name in ("c1", "c2")]
    prompt = read({"messages": [said("user"), said("assistant", "", tool_calls=calls),
                                said("tool", "two", tool_call_id="c2"),
                                said("tool", "one", tool_call_id="c1"), said("assistant", "done")]})
    assert prompt.turns == ("x", "two\none") and prompt.answers == ("", "done")


def test_sharegpt_is_the_same_conversation() -> None:
    row = {"conversations": [
        {"from": "human", "value": "Rain?"}, {"from": "function_call", "value": json.dumps(
            {"name": "look", "arguments": {"at": "sky"}})},
        {"from": "observation", "value": "wet"}, {"from": "gpt", "value": "Yes"}],
        "system": "Be brief.", "tools": json.dumps([LOOK]), "category": "tools", "id": "s1"}
    prompt = read(row)
    assert (prompt.id, prompt.category, prompt.system) == ("s1", "tools", "Be brief.")
    assert (prompt.turns, prompt.answers) == (("Rain?", "wet"), ("", "Yes"))
    assert prompt.messages[2]["tool_calls"][0]["function"] == READ_CALL["function"]
    assert read({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}) == \
        read({"turns": ["a"], "answers": ["b"]})


REQUEST = {"model": "m", "messages": [said("user", "a")], "temperature": 0.3, "tools": [LOOK],
           "chat_template_kwargs": {"enable_thinking": False}}
ANSWER = {"choices": [{"message": said("assistant", "b", refusal=None), "finish_reason": "stop"}]}


@pytest.mark.parametrize(("row", "name", "answers"), [
    (REQUEST, "row-1", ()),
    ({"custom_id": "q", "method": "POST", "url": "/v1/chat/completions", "body": REQUEST}, "q", ()),
    ({"id": "r", "request": REQUEST, "response": ANSWER}, "r", ("b",)),
    ({"request": {"body": REQUEST}, "response": {"status_code": 200, "body": ANSWER}}, "row-1", ("b",)),
    ({"request": REQUEST, "response": {"choices": [{"message": said("assistant"),
                                                     "finish_reason": "length"}]}}, "row-1", ())])
def test_a_log_of_requests_is_read_as_it_was_sent(row: dict[str, Any], name: str, answers: Any) -> None:
    prompt = read(row)
    assert (prompt.id, prompt.turns, prompt.answers) == (name, ("a",), answers)
    assert prompt.template["enable_thinking"] is False
    assert prompt.template["tools"][0]["function"] == LOOK


@pytest.mark.parametrize(("messages", "expected"), [
    ([said("user"), said("narrator")], "message 2 has role 'narrator', expected one of system"),
    ([said("user"), said("assistant", None)], 'message 2 is an answer without "content" and without calls'),
    ([said("user", None)], "message 1 has role 'user' and no \"content\""),
    ([said("user", [{"type": "image_url", "image_url": "u"}])], "message 1 has a part of type 'image_url'"),
    ([said("user"), said("assistant", reasoning=3)], "message 2 has reasoning that is no text: 3"),
    ([said("user"), said("assistant", tool_calls=[{"id": "c"}])], 'a call that is no function with a "name"'),
    ([said("user"), said("assistant", tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1'}}])],
     'call of f, "arguments" is no JSON'),
    ([said("user"), said("assistant", tool_calls=[{"function": {"name": "f", "arguments": "[]"}}])],
     '"arguments" must be an object'),
    ([said("user"), said("assistant", tool_calls=[CALL, CALL])], "message 2 has two calls with the id 'c1'"),
    ([said("user"), said("assistant", tool_calls=[CALL]), said("user")],
     "message 3 has role 'user', but 1 calls of the answer before it have no result"),
    ([said("user"), said("assistant", tool_calls=[CALL]), said("tool", tool_call_id="c9")],
     "message 3 is the result of the call 'c9', which no answer before it makes"),
    ([said("user"), said("tool")], "message 2 has role 'tool', expected 'assistant'"),
    ([said("user"), said("assistant", tool_calls=[CALL]), said("tool"), said("tool")],
     "message 4 has role 'tool', expected 'assistant'"),
    ([said("user", " "), said("assistant", tool_calls=[CALL])], "a message of the user is empty"),
    ([said("system"), said("system"), said("user")], "message 1 has role 'system', expected 'user'"),
])
def test_what_is_no_conversation_is_refused_with_its_message(messages: list[Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read({"messages": messages})
    assert expected in str(caught.value) and str(caught.value).startswith("file, line 1: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("row", "expected"), [
    ({"conversations": [], "messages": []}, '"conversations" stands beside "messages"'),
    ({"request": {}, "body": {}}, '"request" stands beside "body"'),
    ({"conversations": "a"}, '"conversations" must be a list of objects with "from" and "value"'),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "message 1 is from 'alien', saying 'a'; expected"),
    ({"conversations": [{"from": "human", "value": 1}]}, "message 1 is from 'human', saying 1; expected"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]},
     "message 2 calls a function by what is no JSON: '{'"),
    ({"conversations": [{"from": "gpt", "value": "a"}]}, "message 1 has role 'assistant', expected 'user'"),
    ({"request": "a"}, "\"request\" must be an object, found 'a'"),
    ({"body": {"input": "a"}}, 'the request has no "messages", so it is no chat'),
    ({"request": REQUEST, "response": {"status_code": 500, "body": {}}}, 'no "choices" (status 500)'),
    ({"request": REQUEST, "response": {"choices": [{"message": "a"}]}}, '"messages" must be a list of'),
    ({"turns": ["a"], "tools": {"a": 1}}, '"tools" must be a list of definitions of functions'),
    ({"turns": ["a"], "tools": "[{"}, '"tools" is no JSON'),
    ({"turns": ["a"], "tools": [{"type": "retrieval", "name": "x"}]}, "which is no function with a \"name\""),
])
def test_other_shapes_that_cannot_be_read_are_refused(row: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(row)
    assert expected in str(caught.value) and str(caught.value).startswith("file, line 1: ")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                        ["role", "content", "tool_calls", "function", "name", "arguments", "from", "value",
                         "id", "messages", "choices", "message", "type", "text", "body"]), inner, max_size=4),
                    max_leaves=12)
ROW = st.dictionaries(st.sampled_from(["turns", "messages", "conversations", "request", "response", "body",
                                       "tools", "answers", "system", "id", "category"]), JSON, max_size=4)
MESSAGES = st.lists(st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": JSON},
    optional={"tool_calls": JSON, "reasoning": JSON, "tool_call_id": JSON, "name": JSON}), max_size=4)


TALKS = st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": JSON})


@given(st.lists(ROW | JSON | TALKS, max_size=6))
def test_any_json_is_a_prompt_or_a_named_bad_row(values: list[Any]) -> None:
    """Nothing that can stand in a file makes reading fail, and no row is lost unseen."""
    bad: list[str] = []
    rows = parse_all(((f"file, line {number}", number, value) for number, value in enumerate(values, 1)), bad)
    assert len(rows) + len(bad) == len(values)
    assert all(what.startswith("file, line ") for what in bad)
    for prompt, _ in rows:
        open_turns = len(prompt.turns) - len(prompt.answers)
        assert open_turns in (0, 1) or (open_turns > 0 and not prompt.messages)
        assert messages_of(prompt, list(prompt.answers))
