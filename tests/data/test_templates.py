"""What chat templates do, and the ids and masks that follow: one behaviour each, as models are published
with, in templates written for these tests.

Expected rows are spelled as pieces of text, supervised or not. The tokenizer has the 256 bytes and no merges,
so the ids of a row are those of its pieces, whatever the template did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from trainer.data.chat import Chat, Message
from trainer.data.prompt_rows import parse_object
from trainer.errors import UserError
from trainer.target_made import CHATML, byte_tokenizer

Piece = tuple[str, bool]
ASKED, SAMPLED = False, True
END = "<|im_end|>"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HEAD = "<|im_start|>{{ m.role }}\n"
NO_GENERATION_PROMPT = "{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION_TAGS = ("{% for m in messages %}" + HEAD + "{% if m.role == 'assistant' %}{% generation %}"
                   "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n"
                   "{% endif %}{% endfor %}" + GENERATE)
ROLES = ("{% for m in messages %}<role>{{ m.role | upper }}</role>{{ m.content }}<|endoftext|>{% endfor %}"
         "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}")
DEFAULT_SYSTEM = ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
                  + CHATML)
# Shows the reasoning of answers after the last question; with thinking off the prompt has an empty block.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}" + HEAD +
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + GENERATE[:-11] +
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}")
OPENED = ("{% for m in messages %}" + HEAD + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning }}"
          "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + GENERATE[:-11]
          + "<think>\n{% endif %}")
TOOLS = ("{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n"
         "{% endif %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
         "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}"
         "</tool_response><|im_end|>\n{% elif m.role != 'system' or not tools %}" + HEAD + "{{ m.content }}"
         "{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": "
         "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
         + GENERATE)
TWO_ENDS = ("{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>"
            "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}" + GENERATE)
# The last answer ends otherwise than the same answer inside a conversation.
UNSTABLE = ("{% for m in messages %}" + HEAD + "{{ m.content }}{% if m.role == 'assistant' and loop.last %}"
            "<|im_end|>{% else %}<|endoftext|>{% endif %}{% endfor %}" + GENERATE)
BEGINNING = "{{ bos_token }}" + CHATML
FOLDED = ("{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
          "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ first if loop.index0 < 2 }}"
          "{{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }}<|endoftext|>"
          "{% endif %}{% endfor %}")
CALL_END = ("{% for m in messages %}" + HEAD + "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}(){% endfor %}{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}"
            "{% endfor %}" + GENERATE)

ONE = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
TWO = [*ONE, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
THOUGHT = [{**message, "reasoning_content": f"sum {number}"} if message["role"] == "assistant" else message
           for number, message in enumerate(TWO)]
WEATHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SHOWN = ('{"type": "function", "function": {"name": "look", "description": null, "parameters": '
         '{"type": "object"}}}\n')
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
CALLED = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>' + END
ERRAND = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
          {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Rain?"},
          {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "c1", "content": "wet"}, {"role": "assistant", "content": "Yes"}]
OPEN = "<|im_start|>assistant\n"
ASK = turn("user", "2+2?")
ASK2 = turn("user", "3+3?")


@dataclass(frozen=True)
class Behaviour:
    template: str
    messages: list[dict[str, Any]]
    rows: list[list[Piece]]
    ends: tuple[str, ...] = (END,)
    beside: dict[str, Any] = field(default_factory=dict)  # keys of the row beside its messages


BEHAVIOURS = {
    "plain": Behaviour(CHATML, ONE, [[(ASK + OPEN, ASKED), ("4" + END, SAMPLED)]]),
    "no generation prompt": Behaviour(NO_GENERATION_PROMPT, ONE, [[(ASK, ASKED),
                                                                   (OPEN + "4" + END, SAMPLED)]]),
    "generation tags": Behaviour(GENERATION_TAGS, ONE, [[(ASK + OPEN, ASKED), ("4" + END, SAMPLED)]]),
    "unknown role header": Behaviour(
        ROLES, ONE, [[("<role>USER</role>2+2?<|endoftext|><role>ASSISTANT</role>", ASKED),
                      ("4<|endoftext|>", SAMPLED)]], ("<|endoftext|>",)),
    "a default system prompt": Behaviour(
        DEFAULT_SYSTEM, ONE, [[(turn("system", "Be nice.") + ASK + OPEN, ASKED), ("4" + END, SAMPLED)]]),
    "no default where there is a system text": Behaviour(
        DEFAULT_SYSTEM, [{"role": "system", "content": "Be quick."}, *ONE],
        [[(turn("system", "Be quick.") + ASK + OPEN, ASKED), ("4" + END, SAMPLED)]]),
    "thinking on": Behaviour(THINKING, THOUGHT[:2], [[(ASK + OPEN, ASKED), (
        "<think>\nsum 1\n</think>\n\n4" + END, SAMPLED)]]),
    "thinking off": Behaviour(THINKING, ONE, [[(ASK + OPEN + "<think>\n\n</think>\n\n", ASKED),
                                               ("4" + END, SAMPLED)]],
                              beside={"chat_template_kwargs": {"enable_thinking": False}}),
    "an empty block of thinking": Behaviour(THINKING, ONE, [[(ASK + OPEN, ASKED), (
        "<think>\n\n</think>\n\n4" + END, SAMPLED)]]),
    "a history that loses reasoning": Behaviour(THINKING, THOUGHT, [
        [(ASK + OPEN, ASKED), ("<think>\nsum 1\n</think>\n\n4" + END, SAMPLED)],
        [(ASK + turn("assistant", "4") + ASK2 + OPEN, ASKED),
         ("<think>\nsum 3\n</think>\n\n6" + END, SAMPLED)]]),
    "thinking opened by the prompt": Behaviour(OPENED, THOUGHT[:2], [[(ASK + OPEN + "<think>\n", ASKED),
                                                                      ("sum 1</think>4" + END, SAMPLED)]]),
    "tools": Behaviour(TOOLS, ERRAND, [[
        (turn("system", "Be brief.\n" + SHOWN) + turn("user", "Hi") + OPEN, ASKED), ("Hello" + END, SAMPLED),
        ("\n" + turn("user", "Rain?") + OPEN, ASKED), (CALLED, SAMPLED),
        ("\n" + turn("user", "<tool_response>wet</tool_response>") + OPEN, ASKED), ("Yes" + END, SAMPLED)]],
        beside={"tools": [WEATHER]}),
    "another end after a call": Behaviour(CALL_END, ERRAND[3:], [[
        ("<|im_start|>user\nRain?<|im_end|>" + OPEN, ASKED), ("look()<|endoftext|>", SAMPLED),
        ("<|im_start|>tool\nwet<|im_end|>" + OPEN, ASKED), ("Yes<|im_end|>", SAMPLED)]],
        (END, "<|endoftext|>")),
    "several turns": Behaviour(CHATML, TWO, [[(ASK + OPEN, ASKED), ("4" + END, SAMPLED),
                                              ("\n" + ASK2 + OPEN, ASKED), ("6" + END, SAMPLED)]]),
    "two ends": Behaviour(TWO_ENDS, TWO, [[
        ("<|im_start|>user\n2+2?<|im_end|>" + OPEN, ASKED), ("4" + END, SAMPLED),
        ("<|endoftext|><|im_start|>user\n3+3?<|im_end|>" + OPEN, ASKED), ("6" + END, SAMPLED)]],
        (END, "<|endoftext|>")),
    "prefixes that do not last": Behaviour(UNSTABLE, TWO, [
        [("<|im_start|>user\n2+2?<|endoftext|>" + OPEN, ASKED), ("4" + END, SAMPLED)],
        [("<|im_start|>user\n2+2?<|endoftext|>" + OPEN + "4<|endoftext|>"
          "<|im_start|>user\n3+3?<|endoftext|>" + OPEN, ASKED), ("6" + END, SAMPLED)]]),
    "a token that begins texts": Behaviour(BEGINNING, ONE, [[("<|im_start|>" + ASK + OPEN, ASKED),
                                                             ("4" + END, SAMPLED)]]),
    "a system text in the first turn, an answer that is trimmed": Behaviour(
        FOLDED, [{"role": "system", "content": "Be brief."}, ONE[0],
                 {"role": "assistant", "content": " 4\n"}],
        [[("[INST] Be brief.\n\n2+2? [/INST]", ASKED), (" 4<|endoftext|>", SAMPLED)]], ("<|endoftext|>",)),
    "other scripts": Behaviour(CHATML, [{"role": "user", "content": "你好吗?"},
                                        {"role": "assistant", "content": "نعم 😀 é"}],
                               [[(turn("user", "你好吗?") + OPEN, ASKED), ("نعم 😀 é" + END, SAMPLED)]]),
}


def chat_of(template: str, ends: tuple[str, ...] = (END,), tokenizer: Any = None) -> Chat:
    tokenizer = tokenizer or byte_tokenizer(264)
    tokenizer.chat_template = template
    return Chat(tokenizer, {}, tuple(tokenizer.convert_tokens_to_ids(end) for end in ends))


def ids_of(tokenizer: Any, pieces: list[Piece]) -> tuple[list[int], list[bool]]:
    coded = [(tokenizer(text, add_special_tokens=False).input_ids, flag) for text, flag in pieces]
    return [each for ids, _ in coded for each in ids], [flag for ids, flag in coded for _ in ids]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_ids_and_mask(name: str) -> None:
    behaviour = BEHAVIOURS[name]
    chat = chat_of(behaviour.template, behaviour.ends)
    prompt, _ = parse_object({"messages": behaviour.messages, **behaviour.beside}, "row 1", 1)
    expected = [ids_of(chat.tokenizer, pieces) for pieces in behaviour.rows]
    found = chat.given(prompt)
    texts = [[chat.tokenizer.decode(ids) for ids, _ in rows] for rows in (found, expected)]
    assert texts[0] == texts[1]
    assert found == expected


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_supervised_stretch_begins_where_the_server_would_begin(name: str) -> None:
    """Every stretch follows exactly what the server is given, as the template renders it for a request."""
    behaviour = BEHAVIOURS[name]
    chat = chat_of(behaviour.template, behaviour.ends)
    prompt, _ = parse_object({"messages": behaviour.messages, **behaviour.beside}, "row 1", 1)
    chat = chat.of_prompt(prompt)
    messages: list[Message] = list(prompt.messages) or [dict(each) for each in behaviour.messages]
    asked = [chat.render(messages[:place], generate=True) for place, message in enumerate(messages)
             if message["role"] == "assistant"]
    starts = [ids[:place] for ids, mask in chat.supervised(messages) for place, flag in enumerate(mask)
              if flag and not (place and mask[place - 1])]
    assert starts == asked


def test_a_tokenizer_that_adds_a_beginning_does_not_double_it() -> None:
    tokenizer = byte_tokenizer(264)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)])
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id, "it does add one to plain texts"
    chat = chat_of(BEGINNING, tokenizer=tokenizer)
    [(ids, mask)] = chat.supervised(ONE)
    assert (ids, mask) == ids_of(tokenizer, BEHAVIOURS["a token that begins texts"].rows[0])


def joining_tokenizer() -> Any:
    """Bytes, and one merge: two newlines are a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def test_no_token_lies_across_the_border_of_prompt_and_answer() -> None:
    """The server is given the newline that ends the prompt, and samples another one."""
    tokenizer = joining_tokenizer()
    chat = chat_of(CHATML, tokenizer=tokenizer)
    joined = tokenizer("\n\n", add_special_tokens=False).input_ids
    assert len(joined) == 1, "by itself it is one token"
    messages = [ONE[0], {"role": "assistant", "content": "\nfour"}, *TWO[2:]]
    first, second = chat.supervised(messages)
    assert first == ids_of(tokenizer, [(ASK + OPEN, ASKED), ("\nfour" + END, SAMPLED)])
    assert joined[0] not in first[0] and joined[0] in second[0], "in the history it is what the server reads"
    assert second[0][:second[1].index(True)] == chat.prompt(messages[:3])


def test_an_answer_that_the_template_hides_cannot_be_supervised() -> None:
    """The prompt opens a block of thinking that the rendered answer does not have."""
    template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    with pytest.raises(UserError, match=r"does not continue its own generation prompt at turn 2: .*<think>"):
        chat_of(template).supervised(ONE)
