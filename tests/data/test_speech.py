"""What a target said comes back as the message that it is: what a template writes is read off again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_templates import CALL_END, GENERATE, HEAD, OPENED, THINKING, TOOLS, WEATHER, chat_of

from trainer.data.chat import Chat, Message
from trainer.data.messages import REASONING
from trainer.data.speech import Speech
from trainer.target_made import CHATML

LOOP = ("{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
        "{% else %}" + HEAD)
REST = "<|im_end|>\n{% endif %}{% endfor %}" + GENERATE
CALLS = "{% for c in m.tool_calls or [] %}"
# Thinking and calls, as JSON in tags.
BOTH = (LOOP + "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}"
        + CALLS + "{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
        "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n"
        "</tool_call>{% endfor %}" + REST)
# Each argument between tags of its own.
TAGGED = (LOOP + "{{ m.content }}" + CALLS + "<tool_call>\n<function={{ c.function.name }}>\n"
          "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
          "{% endfor %}</function>\n</tool_call>{% endfor %}" + REST)
KEYED = (LOOP + "{{ m.content }}" + CALLS + "<tool_call>{{ c.function.name }}"
         "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
         "<arg_value>{{ v }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}" + REST)
# All calls in a section, names apart from the arguments; one writes the id of a call.
SECTION = (LOOP + "{{ m.content }}{% if m.tool_calls %}<calls>" + CALLS + "<call>function<sep>"
           "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<end>{% endfor %}</calls>"
           "{% endif %}" + REST)
NUMBERED = (LOOP + "{{ m.content }}{% if m.tool_calls %}<calls>" + CALLS + "<call>{{ c.id }}<with>"
            "{{ c.function.arguments | tojson }}<end>{% endfor %}</calls>{% endif %}" + REST)
BRACKETS = (LOOP + "{{ m.content }}{% if m.tool_calls %}[CALLS] [" + CALLS + "{\"name\": "
            "\"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}"
            "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + REST)
# Reasoning, text and calls are messages in channels.
CHANNELS = ("{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
            "{% if m.reasoning %}<channel>think<message>{{ m.reasoning }}<end><|im_start|>assistant"
            "{% endif %}{% if m.tool_calls %}{% for c in m.tool_calls %} to={{ c.function.name }}"
            "<channel>json<message>"
            "{{ c.function.arguments | tojson }}{% endfor %}{% else %}<channel>final<message>{{ m.content }}"
            "{% endif %}{% else %}<message>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
ONE_CALL = ("{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}"
            "{% endif %}{% endfor %}" + BOTH)
TEMPLATES = {"both": BOTH, "tagged": TAGGED, "keyed": KEYED, "section": SECTION, "numbered": NUMBERED,
             "brackets": BRACKETS, "channels": CHANNELS, "one call": ONE_CALL, "tools": TOOLS}
SINGLE = ("channels", "one call")
THINKERS = ("both", "channels", "one call")
ASKED = {"role": "user", "content": "Rain?"}


@cache
def speech(template: str, **arguments: bool) -> Speech:
    return Speech.of(replace(chat_of(template), template={"tools": [WEATHER], **arguments}))


def said(chat: Chat, message: Message) -> list[int]:
    """The ids that the template writes for an answer, up to the end of the turn."""
    before, whole = chat.prompt([ASKED]), chat.render([ASKED, message], generate=False)
    assert whole[:len(before)] == before
    rest = whole[len(before):]
    return rest[:next(place for place, token in enumerate(rest) if token in chat.end_ids) + 1]


def answer(content: str, reasoning: str = "", *calls: tuple[str, dict[str, Any]]) -> Message:
    found: Message = {"role": "assistant", "content": content}
    if reasoning:
        found |= dict.fromkeys(REASONING, reasoning)
    if calls:
        found["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}
                               for name, arguments in calls]
    return found


def with_ids(message: Message) -> Message:
    """As a client sends it, whose calls have ids."""
    calls = [{"id": f"functions.{call['function']['name']}:{number}", **call}
             for number, call in enumerate(message.get("tool_calls", []))]
    return {**message, "tool_calls": calls} if calls else message


WORD = st.text("abc dé?", min_size=1, max_size=12).map(str.strip).filter(bool)
NAME = st.sampled_from(["look", "find_it", "go-on"])
ARGUMENTS = st.dictionaries(st.sampled_from(["at", "of_what"]), WORD, max_size=2)


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
def test_what_a_template_writes_is_read_off_again(name: str, data: st.DataObject) -> None:
    spoken = speech(TEMPLATES[name])
    reasoning = data.draw(WORD | st.just("")) if name in THINKERS else ""
    calls = data.draw(st.lists(st.tuples(NAME, ARGUMENTS), max_size=1 if name in SINGLE else 3))
    content = data.draw(WORD) if not calls else ""
    message = answer(content, reasoning, *calls)
    assert spoken.message(said(spoken.chat, with_ids(message))) == message


@pytest.mark.parametrize("template", [BOTH, TAGGED, KEYED, SECTION])
def test_text_may_stand_before_a_call(template: str) -> None:
    spoken, message = speech(template), answer("I look.", "", ("look", {"at": "sky"}))
    assert spoken.message(said(spoken.chat, message)) == message


def test_blanks_in_a_call_are_as_the_target_writes_them() -> None:
    spoken = speech(BOTH)
    text = '<tool_call>{"name":"look",\n "arguments": {"at":"sky", "n": [1, {"b": null}]}}</tool_call>'
    assert spoken.message(spoken.chat.tokenizer(text + "<|im_end|>").input_ids) == answer(
        "", "", ("look", {"at": "sky", "n": [1, {"b": None}]}))


@pytest.mark.parametrize("text", [
    '<tool_call>\n{"name": "look", "arguments": {"at": "sk', '<tool_call>\n{"name": "look", "arguments": []}',
    '<tool_call>\n{"name": "look"}', "<tool_call>", "<think>\nwhy"])
def test_what_does_not_end_stays_a_text(text: str) -> None:
    spoken = speech(BOTH)
    assert spoken.message(spoken.chat.tokenizer(text).input_ids) == answer(text)


def test_calls_are_read_only_where_there_are_tools() -> None:
    spoken = Speech.of(chat_of(BOTH))
    ids = said(spoken.chat, answer("", "", ("look", {"at": "sky"})))
    assert "tool_calls" not in spoken.message(ids) and "<tool_call>" in spoken.message(ids)["content"]


@pytest.mark.parametrize(("template", "text", "expected"), [
    (THINKING, "<think>\nsum\n</think>\n\n4", answer("4", "sum")),
    (THINKING, "4", answer("4")),
    (THINKING, "<think>\n\n</think>\n\n4", answer("4")),
    (OPENED, "sum</think>4", answer("4", "sum")),
    (CHATML, "<think>sum</think>4", answer("<think>sum</think>4")),
    (CALL_END, "look()", answer("look()"))])
def test_reasoning_is_told_from_the_answer_as_the_template_does(template: str, text: str,
                                                                expected: Message) -> None:
    spoken = speech(template)
    assert spoken.message(spoken.chat.tokenizer(text + "<|im_end|>").input_ids) == expected


def test_with_thinking_off_an_answer_is_all_text() -> None:
    spoken = speech(THINKING, enable_thinking=False)
    assert spoken.message(spoken.chat.tokenizer("4<|im_end|>").input_ids) == answer("4")


def test_special_tokens_are_no_part_of_a_text() -> None:
    spoken = speech(BOTH)
    ids = spoken.chat.tokenizer("<think>\na<|im_start|>b\n</think>\n\nc<|endoftext|>d<|im_end|>").input_ids
    assert spoken.message(ids) == answer("cd", "ab")
