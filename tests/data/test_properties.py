"""What holds for every conversation: which tokens are learnt, how rows are packed, and in which order."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speech import BOTH, KEYED, SECTION, TAGGED
from test_templates import (
    BEGINNING,
    DEFAULT_SYSTEM,
    FOLDED,
    THINKING,
    TOOLS,
    TWO_ENDS,
    UNSTABLE,
    WEATHER,
    chat_of,
)

from trainer.data.chat import Chat, Message, spans
from trainer.data.packing import collate, dealt, plan_epoch
from trainer.data.prompt_rows import parse_object
from trainer.errors import UserError
from trainer.records import HiddenStates, Sample
from trainer.target_made import CHATML

ENDS = ("<|im_end|>", "<|endoftext|>")
TEMPLATES = {"plain": CHATML, "beginning": BEGINNING, "default system": DEFAULT_SYSTEM, "two ends": TWO_ENDS,
             "unstable": UNSTABLE, "folded": FOLDED, "thinking": THINKING, "tools": TOOLS, "both": BOTH,
             "tagged": TAGGED, "keyed": KEYED, "section": SECTION}
CALLING = ("tools", "both", "tagged", "keyed", "section")
TEXT = st.text("ab é你\n .<>{}\"", min_size=1, max_size=10).filter(lambda text: text.strip() == text)
ARGUMENTS = st.dictionaries(st.sampled_from(["at", "of"]), TEXT, max_size=2)


@st.composite
def talks(draw: st.DrawFn, calling: bool) -> list[Message]:
    """Any conversation that may be: a system text or none, turns with reasoning, calls and their results."""
    found: list[Message] = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        found.append({"role": "user", "content": draw(TEXT)})
        for number in range(draw(st.integers(0, 2)) if calling else 0):
            call = {"id": f"c{number}", "type": "function",
                    "function": {"name": "look", "arguments": draw(ARGUMENTS)}}
            found += [{"role": "assistant", "content": draw(st.just("") | TEXT), "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": f"c{number}", "content": draw(TEXT)}]
        found.append({"role": "assistant", "content": draw(TEXT)})
        if draw(st.booleans()):
            found[-1]["reasoning"] = draw(TEXT)
    return found


@cache
def chat(name: str) -> Chat:
    return chat_of(TEMPLATES[name], ENDS)


def learnt(name: str,
           talk: list[Message]) -> tuple[Chat, list[Message], list[tuple[list[int], list[bool]]]]:
    """The chat as it is for a conversation, its messages, and the rows that are made of it."""
    row: dict[str, Any] = {"messages": talk, "tools": [WEATHER]} if name in CALLING else {"messages": talk}
    prompt, _ = parse_object(row, "row 1", 1)
    own = chat(name).of_prompt(prompt)
    messages = [*prompt.messages] or [dict(each) for each in talk]
    return own, messages, chat(name).given(prompt)


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
def test_each_answer_is_learnt_once_behind_what_the_server_is_given(name: str, data: st.DataObject) -> None:
    own, messages, rows = learnt(name, data.draw(talks(name in CALLING)))
    asked = [own.prompt(messages[:place]) for place, message in enumerate(messages)
             if message["role"] == "assistant"]
    found = [(ids, start, end) for ids, mask in rows for start, end in spans(mask) if mask[start]]
    assert [ids[:start] for ids, start, _ in found] == asked, "the server samples the first token first"
    for ids, start, end in found:
        inside = [place for place in range(start, end) if ids[place] in own.end_ids]
        assert inside in ([], [end - 1]), "the end of a turn is learnt, and nothing behind it"
    for ids, mask in rows:
        assert len(ids) == len(mask) and mask[-1], "nothing stands behind the last answer"
    assert len(rows) in (1, len(asked))


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
def test_what_is_learnt_is_what_the_template_writes_for_the_answer(name: str, data: st.DataObject) -> None:
    own, messages, rows = learnt(name, data.draw(talks(name in CALLING)))
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found = [own.tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
             for ids, mask in rows for start, end in spans(mask) if mask[start]]
    for place, text in zip(places, found, strict=True):
        whole, before = (own.text(messages[:place + more], generate=not more) for more in (1, 0))
        written = whole[len(before):]
        assert written.startswith(text) and (text.endswith(ENDS) or written == text)
        content = messages[place]["content"]
        assert content.strip() in text


@st.composite
def samples_of(draw: st.DrawFn) -> list[Sample]:
    """Rows of random conversations, as training gets them."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(TEMPLATES)))
        _, _, rows = learnt(name, draw(talks(name in CALLING)))
        found += [Sample(f"p{number}#{place}", tuple(ids), tuple(mask))
                  for place, (ids, mask) in enumerate(rows)]
    return found


@settings(max_examples=40)
@given(samples_of(), st.integers(0, 3), st.integers(0, 2), st.integers(0, 400))
def test_packed_rows_are_the_samples_and_nothing_between_them(samples: list[Sample], seed: int, epoch: int,
                                                              more: int) -> None:
    lengths = [len(sample.tokens) for sample in samples]
    tokens = max(lengths) + more
    rows = plan_epoch(lengths, tokens, seed, epoch)
    seen: list[str] = []
    for indices in rows:
        own = [samples[index] for index in indices]
        states = [HiddenStates(*torch.zeros(2, len(each.tokens), 1)) for each in own]
        batch = collate(own, states, 0, "cpu", tokens)
        assert len(batch.tokens) == tokens
        for number, sample in enumerate(own):
            here = batch.document == number
            assert batch.tokens[here].tolist() == list(sample.tokens), "whole, in order, in one piece"
            assert batch.loss_mask[here].tolist() == list(sample.loss_mask)
            assert batch.position[here].tolist() == list(range(len(sample.tokens))), "positions restart"
            seen.append(sample.id)
        rest = batch.document == -1
        assert not batch.loss_mask[rest].any() and int(rest.sum()) == tokens - sum(map(len, (
            sample.tokens for sample in own)))
        assert (batch.document[:tokens - int(rest.sum())].diff() >= 0).all()
    assert sorted(seen) == sorted(sample.id for sample in samples), "each once an epoch"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(0, 5), st.integers(0, 5),
       st.sampled_from([1, 2, 4]))
def test_the_order_is_that_of_seed_and_epoch_whoever_shares_it(lengths: list[int], seed: int, epoch: int,
                                                               accumulate: int) -> None:
    rows = plan_epoch(lengths, 64, seed, epoch)
    assert rows == plan_epoch([*lengths], 64, seed, epoch)
    loads = [sum(lengths[index] for index in row) for row in rows]
    for step in range(len(rows) // accumulate):
        own = loads[step * accumulate:(step + 1) * accumulate]
        for shares in (shares for shares in (1, 2, 4) if accumulate % shares == 0):
            found = [place for share in dealt(own, shares) for place in share]
            assert sorted(found) == list(range(accumulate)), "the same rows in every step"


@given(st.data())
def test_a_conversation_without_an_answer_has_nothing_to_learn(data: st.DataObject) -> None:
    talk = data.draw(talks(False))
    asked = [message for message in talk if message["role"] != "assistant"][:2]
    with pytest.raises(UserError, match="no assistant turn"):
        chat("plain").supervised(asked)
