"""Rows that are no conversations, of every kind, in one file: counted, named with file and line, left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import copied

from trainer.data.as_given import AsGiven
from trainer.data.prompts import FACTS, Jsonl, Prompts, read_prompts
from trainer.data.report import JSON
from trainer.data.response_rows import read_rows
from trainer.errors import UserError
from trainer.target import Target


def said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = said("assistant", "", tool_calls=[CALL])
UNCLOSED = {**CALL, "function": {"name": "f", "arguments": '{"a": "b'}}
KINDS: dict[str, tuple[Any, str]] = {
    "a turn that is a number": ({"turns": [1]}, '"turns" must be a list of texts'),
    "messages that are texts": ({"messages": ["x"]}, '"messages" must be a list of objects'),
    "content that is a number": ({"messages": [said("user", 3)]}, '"messages" must be a list of objects'),
    "a system text that is a list": ({"turns": ["x"], "system": []}, '"system" must be a text'),
    "a list for a row": ([1, 2], 'expected an object with "turns" or "messages"'),
    "no role": ({"messages": [{"content": "x"}]}, '"messages" must be a list of objects with "role"'),
    "a role of null": ({"messages": [said(None)]}, '"messages" must be a list of objects with "role"'),
    "an unknown role": ({"messages": [said("critic")]}, "message 1 has role 'critic'"),
    "an answer first": ({"messages": [said("assistant")]}, "message 1 has role 'assistant', expected 'user'"),
    "an empty turn": ({"turns": [""]}, '"turns" must be a list of texts that are not empty'),
    "an empty message": ({"messages": [said("user", " "), said("assistant")]}, "texts that are not empty"),
    "an answer of nothing": ({"messages": [said("user"), said("assistant", None)]},
                             'an answer without "content"'),
    "half a surrogate in a turn": ('{"turns": ["\\ud83d"]}', "half of a surrogate pair"),
    "half a surrogate in a message": ('{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
                                      "half of a surrogate pair"),
    "half a surrogate in a call": ({"messages": [said("user"), said("assistant", "", tool_calls=[
        {**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]), said("tool")]},
        "half of a surrogate pair"),
    "NUL in a turn": ({"turns": ["a\0b"]}, "holds a NUL character"),
    "NUL in a result": ({"messages": [said("user"), CALLING, said("tool", "\0")]}, "holds a NUL character"),
    "NUL in reasoning": ({"messages": [said("user"), said("assistant", reasoning="\0")]},
                         "holds a NUL character"),
    "ten megabytes": ({"turns": ["word " * (2 << 20)]}, "bytes, more than any target reads"),
    "a call without result": ({"messages": [said("user"), CALLING, said("user")]},
                              "1 calls of the answer before it have no result"),
    "arguments that do not end": ({"messages": [said("user"), said("assistant", "", tool_calls=[UNCLOSED])]},
                                  '"arguments" is no JSON'),
    "a call that does not end": ('{"conversations": [{"from": "human", "value": "x"}, '
                                 '{"from": "function_call", "value": "{\\"name\\": "}]}', "what is no JSON"),
    "an id again": ({"id": "good-0", "turns": ["y"]}, "the id 'good-0' is that of"),
    "a call's id again": ({"messages": [said("user"), said("assistant", "", tool_calls=[CALL, CALL])]},
                          "two calls with the id 'c'"),
    "no JSON": ("{not json", "not valid JSON"),
    "half a line": ('{"turns": ["x"', "not valid JSON"),
    "no UTF-8": (b'{"turns": ["\xff"]}', "is no UTF-8"),
}
BAD = {name: (row if isinstance(row, str | bytes) else json.dumps(row), why)
       for name, (row, why) in KINDS.items()}
GOOD = 40


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Good rows with a bad one behind each of the first."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        bad = [line for line, _ in BAD.values()]
        for number in range(GOOD):
            row = {"id": f"good-{number}", "turns": [f"question {number}"], "answers": [f"answer {number}"]}
            file.write(json.dumps(row).encode() + b"\n")
            if number < len(bad):
                line = bad[number]
                file.write((line if isinstance(line, bytes) else line.encode()) + b"\n")
    return path


def test_each_is_named_and_none_is_learnt_from(mixed: Path, tiny_target: Target, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    out, answers = tmp_path / "prompts", tmp_path / "answers"
    out.mkdir()
    answers.mkdir()
    record = Prompts(Jsonl(str(mixed)), None, 4, 0.5, None, None, None).run({}, out)
    facts = json.loads((out / FACTS).read_text())
    assert record["bad"] == len(facts["bad"]) == len(BAD)
    for number, (told, (name, (_, why))) in enumerate(zip(facts["bad"], BAD.items(), strict=True)):
        assert told.startswith(f"{mixed}, line {2 * number + 2}: ") and why in told, name
    assert {prompt.id for prompt, _ in read_prompts(out)} == {f"good-{number}" for number in range(GOOD)}
    AsGiven(tiny_target, 200, None, None).run({"prompts": out}, answers)
    assert {row["id"] for row in read_rows(answers)} == {f"good-{number}#0" for number in range(GOOD)}
    data = json.loads((answers / JSON).read_text())
    [left_out] = data["left_out"]
    assert left_out["why"] == "is no conversation" and left_out["count"] == len(BAD)
    assert capsys.readouterr().out.count("prompts: left out: ") == 6, "five are named, and ..."


def test_they_stop_the_run_when_they_are_too_many(mixed: Path, tmp_path: Path) -> None:
    share = len(BAD) / (len(BAD) + GOOD)
    tmp_path.joinpath("out").mkdir()
    Prompts(Jsonl(str(mixed)), None, 0, share, None, None, None).run({}, tmp_path / "out")
    with pytest.raises(UserError, match=f"{len(BAD) - 1} more of the {len(BAD) + GOOD} rows are bad as well"):
        Prompts(Jsonl(str(mixed)), None, 0, share - 0.01, None, None, None).run({}, tmp_path / "out")


def test_a_call_without_result_may_end_a_conversation(tiny_target: Target, tmp_path: Path) -> None:
    """It is an answer like any other."""
    made = copied(tiny_target, tmp_path / "target")
    (made.folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}(){% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    source, out, answers = tmp_path / "rows.jsonl", tmp_path / "prompts", tmp_path / "answers"
    source.write_text(json.dumps({"messages": [said("user"), CALLING]}) + "\n")
    out.mkdir()
    answers.mkdir()
    Prompts(Jsonl(str(source)), None, 0, 0.0, None, None, None).run({}, out)
    AsGiven(made, 200, None, None).run({"prompts": out}, answers)
    [row] = read_rows(answers)
    learnt = [token for token, flag in zip(row["tokens"], row["mask"], strict=True) if flag]
    assert made.tokenizer.decode(learnt) == "f()<|im_end|>"
