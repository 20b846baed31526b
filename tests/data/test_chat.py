"""Loss masks from chat templates of several families: what the server would sample, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.chat import Chat, Message, coloured
from trainer.errors import UserError
from trainer.target_made import CHATML, byte_tokenizer

ROLES = ("{% for m in messages %}<role>{{ m.role | upper }}</role>{{ m.content }}<|endoftext|>{% endfor %}"
         "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}")
# Shows thinking only in the newest answer, and opens the answer with an empty block when thinking is off.
HYBRID = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
          "{% if m.role == 'assistant' %}"
          "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content %}"
          "{% if loop.last %}<think>{{ thought or '' }}</think>{% endif %}"
          "{{ m.content.split('</think>')[-1] }}"
          "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n"
          "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}")
TOOLS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
         "{% for call in m.tool_calls or [] %}<tool_call>{{ call.name }}</tool_call>{% endfor %}<|im_end|>\n"
         "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make(template: str | None, end: str = "<|im_end|>", **arguments: Any) -> Chat:
    tokenizer = byte_tokenizer(264)
    tokenizer.chat_template = template
    return Chat(tokenizer, arguments, (tokenizer.convert_tokens_to_ids(end),))


def talk(*texts: str, system: str | None = None) -> list[Message]:
    """Messages of user and assistant in turn."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": "assistant" if index % 2 else "user", "content": text}
                    for index, text in enumerate(texts)]


def green(chat: Chat, messages: list[Message]) -> list[list[str]]:
    """The supervised spans of every row, as text."""
    found = []
    for ids, mask in chat.supervised(messages):
        assert len(ids) == len(mask)
        spans: list[list[int]] = []
        for index, flag in enumerate(mask):
            if flag and (index == 0 or not mask[index - 1]):
                spans.append([])
            if flag:
                spans[-1].append(ids[index])
        found.append([chat.tokenizer.decode(span) for span in spans])
    return found


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (ROLES, "<|endoftext|>")])
def test_any_header_is_found_without_a_table_of_families(template: str, end: str) -> None:
    assert green(make(template, end), talk("2+2?", "4")) == [["4" + end]]


def test_three_turns_and_a_system_text_are_one_row_with_three_spans() -> None:
    chat = make(CHATML)
    messages = talk("one?", "first", "two?", "second", "three?", "third", system="Be brief.")
    assert green(chat, messages) == [["first<|im_end|>", "second<|im_end|>", "third<|im_end|>"]]
    [(ids, mask)] = chat.supervised(messages)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none?"
    assert chat.tokenizer.decode(ids).startswith(start)
    assert mask[-1], "a row ends with the last end-of-turn token"


def test_what_stands_in_the_prompt_is_not_supervised() -> None:
    """With thinking off the server is given the empty block; with thinking on it samples the thinking."""
    thoughtful = talk("2+2?", "<think>two and two</think>4")
    assert green(make(HYBRID, enable_thinking=False), talk("2+2?", "4")) == [["4<|im_end|>"]]
    found = green(make(HYBRID, enable_thinking=True), thoughtful)
    assert found == [["<think>two and two</think>4<|im_end|>"]]


def test_a_template_that_rewrites_history_gives_one_row_a_turn() -> None:
    chat = make(HYBRID, enable_thinking=True)
    messages = talk("2+2?", "<think>even</think>4", "3+3?", "<think>odd</think>6")
    rows = chat.supervised(messages)
    assert green(chat, messages) == [["<think>even</think>4<|im_end|>"], ["<think>odd</think>6<|im_end|>"]]
    assert "even" not in chat.tokenizer.decode(rows[1][0]), "the history is the one that the server sees"
    for (ids, mask), turn in zip(rows, (1, 3), strict=True):
        assert ids[:mask.index(True)] == chat.prompt(messages[:turn])


def test_tool_calls_are_supervised_and_their_results_are_not() -> None:
    messages = [{"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]},
                {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "It rains."}]
    assert green(make(TOOLS), messages) == [["<tool_call>look</tool_call><|im_end|>", "It rains.<|im_end|>"]]


def test_nothing_is_added_to_what_the_template_writes() -> None:
    chat = make(CHATML)
    prompt = chat.tokenizer.decode(chat.prompt(talk("Hi")))
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_reach_the_template() -> None:
    chat = make("{{ mode }}!", mode="high")
    assert chat.tokenizer.decode(chat.prompt(talk("a"))) == "high!"


def test_a_template_without_an_end_token_supervises_to_the_end_of_the_row() -> None:
    chat = make("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                "{% if add_generation_prompt %}[assistant]{% endif %}")
    assert green(chat, talk("a", "b")) == [["b"]]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.none() | texts,
       st.sampled_from([(CHATML, "<|im_end|>"), (ROLES, "<|endoftext|>")]))
def test_answers_and_only_answers_are_supervised(turns: list[tuple[str, str]], system: str | None,
                                                 family: tuple[str, str]) -> None:
    template, end = family
    messages = talk(*(text for turn in turns for text in turn), system=system)
    assert green(make(template, end), messages) == [[answer + end for _, answer in turns]]


@pytest.mark.parametrize(("template", "messages", "said"), [
    (None, talk("a", "b"), "has no chat template"),
    ("{{ raise_exception('roles must alternate') }}", talk("a", "b"),
     r"with roles \[user, assistant\]: roles must alternate"),
    ("{{ messages[7].content }}", talk("a", "b"), "fails to render"),
    ("{{ 1 + messages[0].content }}", talk("a", "b"), "fails to render"),
    (CHATML, talk("a"), "no assistant turn"),
    (CHATML.replace("<|im_start|>assistant", "<|im_start|>model"), talk("a", "b"),
     "does not continue its own"),
])
def test_a_template_that_cannot_be_used_is_said_in_one_sentence(template: str | None, messages: list[Message],
                                                                said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make(template).supervised(messages)
    assert "\n" not in str(caught.value)


def test_a_row_is_shown_as_it_is_with_the_supervised_part_green() -> None:
    chat = make(CHATML)
    [(ids, mask)] = chat.supervised(talk("a [red]list[/red]?", "[1, 2] \\[x]"))
    shown = coloured(chat.tokenizer, ids, mask)
    assert shown.plain == chat.tokenizer.decode(ids)
    assert [shown.plain[span.start:span.end] for span in shown.spans if "green" in str(span.style)] == \
        ["[1, 2] \\[x]<|im_end|>"]
