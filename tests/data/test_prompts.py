"""Prompts from files: what is accepted, how rows are split, and every refusal with file and line."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.duplicates import Duplicates
from trainer.data.prompts import FACTS, Builtin, Jsonl, Prompts, read_prompts
from trainer.data.splits import split, spread
from trainer.errors import UserError
from trainer.records import UNKNOWN, Prompt


def write(folder: Path, *rows: Any) -> Jsonl:
    """A JSONL source of the rows; texts are written as they are."""
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Jsonl(str(path))


def run(source: Jsonl, folder: Path, limit: int | None = None, heldout: int = 0, max_bad_share: float = 0.0,
        duplicates: Duplicates | None = None) -> list[tuple[Prompt, str]]:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    record = Prompts(source, limit, heldout, max_bad_share, duplicates, None, None).run({}, out)
    rows = read_prompts(out)
    assert (record["train"], record["heldout"]) == tuple(sum(name == part for _, name in rows)
                                                         for part in ("train", "heldout"))
    return rows


def names(rows: list[tuple[Prompt, str]], part: str) -> list[str]:
    return [prompt.id for prompt, name in rows if name == part]


def test_turns_and_messages_say_the_same(tmp_path: Path) -> None:
    source = write(tmp_path, {"turns": ["a", "b"], "system": "s", "answers": ["x", "y"]},
                   {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                                 {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"},
                                 {"role": "assistant", "content": "y"}], "id": "row-1b", "category": "maths",
                    "language": "fr"})
    assert run(source, tmp_path) == [
        (Prompt("row-1", ("a", "b"), "s", "chat", UNKNOWN, ("x", "y")), "train"),
        (Prompt("row-1b", ("a", "b"), "s", "maths", "fr", ("x", "y")), "train")]


def test_a_conversation_may_end_with_the_user(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    [(prompt, _)] = run(write(tmp_path, {"messages": messages}), tmp_path)
    assert prompt.turns == ("user", "user") and prompt.answers == ("assistant",)


def test_any_text_comes_back_as_it_was(tmp_path: Path) -> None:
    """Line separators that are no newlines do not end a row."""
    text = "one\u2028two\x85three\x0bfour\r\nfive\ttab \U0001f600 \u202e"
    raw = '{"turns": ["a\u2028b\x85c"]}'
    rows = run(write(tmp_path, {"turns": [text]}, "", raw), tmp_path)
    assert [prompt.turns for prompt, _ in rows] == [(text,), ("a\u2028b\x85c",)]
    assert rows[1][0].id == "row-3", "ids are line numbers, blank lines counted"


@pytest.mark.parametrize(("line", "said"), [
    ("{not json", r"prompts\.jsonl, line 2: not valid JSON"),
    ('{"turns": ["a"]', r"line 2: not valid JSON"),
    ('["a"]', 'line 2: expected an object with "turns" or "messages"'),
    ('{"prompt": "a"}', 'line 2: expected an object with "turns" or "messages"'),
    ('{"turns": []}', 'line 2: "turns" must be a list of texts that are not empty'),
    ('{"turns": "a"}', 'line 2: "turns" must be a list of texts'),
    ('{"turns": ["a", " "]}', 'line 2: "turns" must be a list of texts that are not empty'),
    ('{"turns": [1]}', 'line 2: "turns" must be a list of texts'),
    ('{"turns": ["a"], "split": "test"}', "line 2: \"split\" must be \"train\" or \"heldout\", found 'test'"),
    ('{"turns": ["a"], "answers": "b"}', 'line 2: "answers" must be a list of texts'),
    ('{"turns": ["a"], "answers": [null]}', 'line 2: "answers" must be a list of texts'),
    ('{"turns": ["a"], "system": 3}', 'line 2: "system" must be a text'),
    ('{"turns": ["a"], "category": 3}', 'line 2: "category" must be a text, found 3'),
    ('{"turns": ["a"], "language": ["en"]}', r'line 2: "language" must be a text, found \[\'en\'\]'),
    ('{"turns": ["a"], "id": 1.5}', 'line 2: "id" must be a text or a whole number, found 1.5'),
    ('{"turns": ["a"], "id": true}', 'line 2: "id" must be a text or a whole number'),
    ('{"turns": ["a"], "answers": ["b", "c"]}', 'at most one for each of the 1 turns'),
    ('{"turns": ["a"], "messages": [{"role": "user", "content": "a"}]}',
     'line 2: "turns" stands beside "messages"'),
    ('{"messages": [{"role": "user", "content": "a"}], "system": "b"}',
     'line 2: "system" stands beside "messages"'),
    ('{"messages": [{"role": "user", "content": "a"}], "answers": []}',
     'line 2: "answers" stands beside "messages"'),
    ('{"turns": null}', 'line 2: "turns" must be a list of texts'),
    (json.dumps({"turns": ["a\0b"]}), "line 2: holds a NUL character, which is no text"),
    (json.dumps({"turns": ["a"], "answers": ["b\0"]}), "line 2: holds a NUL character"),
    (json.dumps({"turns": ["a"], "chat_template_kwargs": {"x": "\0"}}), "line 2: holds a NUL character"),
    ('{"turns": ["a"], "chat_template_kwargs": 1}', 'line 2: "chat_template_kwargs" must be an object'),
    pytest.param('{"turns": ["a"], "category": ' + "[" * 300 + "]" * 300 + "}",
                 'line 2: "category" must be a text', id="deep"),
    pytest.param('{"turns": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: holds lists nested too deeply",
                 id="too deep"),
    pytest.param('{"turns": ["a"], "id": ' + "9" * 5000 + "}", "line 2: holds a number too long to be read",
                 id="too long"),
    *((json.dumps({"turns": ["a"]} | {name: value}), r"line 2: holds '\\ud83d', half of a surrogate pair")
      for name, value in (("turns", ["a", "b \ud83d c"]), ("system", "\ud83d"), ("answers", ["\ud83d"]),
                          ("id", "\ud83d"), ("category", "\ud83d"), ("language", "\ud83d"))),
    ('{"messages": "a"}', 'line 2: "messages" must be a list of objects'),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', 'line 2: "messages" must be a list of objects'),
    ('{"messages": [{"content": "a"}]}', 'line 2: "messages" must be a list of objects with "role"'),
    ('{"turns": ["a"], "turns": ["b"]}', "line 2: the key 'turns' stands twice in one object"),
    ('{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "2: the key 'role' stands twice"),
    ('{"messages": []}', 'line 2: "turns" must be a list of texts'),
    ('{"messages": [{"role": "assistant", "content": "a"}]}',
     "line 2: message 1 has role 'assistant', expected 'user'"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
     "line 2: message 2 has role 'user', expected 'assistant'"),
])
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        run(write(tmp_path, {"turns": ["good"]}, line), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "holds no prompt"), (b"\n  \n", "holds no prompt"),
    (b'{"turns": ["caf\xe9"]}\n', r", line 1: is no UTF-8 \(byte 16\)"),
    (None, "cannot be read")])
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} ?{said}"):
        Jsonl(str(path)).all_rows()


GOOD = [{"turns": [f"a question with the number {number}"]} for number in range(98)]
ODD = [*GOOD[:40], "{not json", *GOOD[40:], {"turns": ["half \ud83d"]}]


def test_few_bad_rows_are_left_out_named_and_counted(tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(write(tmp_path, *ODD), tmp_path, max_bad_share=0.02)
    assert [prompt.turns for prompt, _ in rows] == [tuple(row["turns"]) for row in GOOD]
    facts = json.loads((tmp_path / "out" / FACTS).read_text())
    assert (facts["read"], facts["kept"], facts["dropped"]) == (100, 98, [])
    places = [what.partition(": ")[0] for what in facts["bad"]]
    assert places == [f"{tmp_path / 'prompts.jsonl'}, line {number}" for number in (41, 100)]
    assert "half of a surrogate pair" in facts["bad"][1]
    assert capsys.readouterr().out.splitlines() == [f"prompts: left out: {what}" for what in facts["bad"]]


def test_more_bad_rows_than_allowed_stop_the_run(tmp_path: Path) -> None:
    said = (r"line 41: not valid JSON .*; 1 more of the 100 rows are bad as well "
            r"\(prompts.max_bad_share=0.01 allows for 1\)$")
    with pytest.raises(UserError, match=said):
        run(write(tmp_path, *ODD), tmp_path, max_bad_share=0.01)
    with pytest.raises(UserError, match="no row of the source is a conversation"):
        run(write(tmp_path, "{not json"), tmp_path, max_bad_share=1.0)


def test_a_line_of_ten_megabytes_is_no_conversation(tmp_path: Path) -> None:
    source = write(tmp_path, {"turns": ["a"]}, {"turns": ["word " * (2 << 20)]})
    bad: list[str] = []
    assert len(source.rows(bad)) == 1
    assert len(bad) == 1 and "line 2: has 10,485,776 bytes, more than any target reads (8,388,608)" in bad[0]


def test_a_missing_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read .*give a JSONL file"):
        Prompts(Jsonl(str(tmp_path / "none.jsonl")), None, 0, 0.0, None, None, None).external()


def test_keys_that_nothing_reads_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = {"role": "user", "content": "a", "name": "me", "tool": None}
    run(write(tmp_path, {"turns": ["a"], "weight": 2, "note": None}, {"messages": [message], "weight": 1},
              {"turns": ["b"]}), tmp_path)
    [line] = capsys.readouterr().out.splitlines()[:1]
    assert line.startswith("prompts: of the 3 rows some have keys that nothing reads: 'weight' in 2, "
                           "'messages.name' in 1; a row has id, turns, ")
    run(write(tmp_path, {"turns": ["a"], "id": 1, "split": "train"}), tmp_path)
    assert "nothing reads" not in capsys.readouterr().out


def test_an_id_occurs_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 3: the id 'twice' is that of .*prompts\.jsonl, line 1 "):
        run(write(tmp_path, {"turns": ["a"], "id": "twice"}, "", {"turns": ["b"], "id": "twice"}), tmp_path)
    with pytest.raises(UserError, match=r"line 2: the id 'row-2' is that of .*prompts\.jsonl, line 1 "):
        run(write(tmp_path, {"turns": ["a"], "id": "row-2"}, {"turns": ["b"]}), tmp_path)


def test_null_means_absent_and_ids_may_be_numbers(tmp_path: Path) -> None:
    row = dict.fromkeys(("messages", "system", "answers", "category", "language", "split")) | {"turns": ["a"]}
    rows = run(write(tmp_path, row | {"id": None}, row | {"id": 7}), tmp_path)
    assert [prompt for prompt, _ in rows] == [Prompt("row-1", ("a",)), Prompt("7", ("a",))]


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    one = write(tmp_path, {"turns": ["a"]}).fingerprint()
    assert write(tmp_path, {"turns": ["a"]}).fingerprint() == one
    assert write(tmp_path, {"turns": ["b"]}).fingerprint() != one


def test_held_out_rows_are_chosen_by_their_text(tmp_path: Path) -> None:
    """Order and ids do not matter, and new rows move few: what was trained on does not become held out."""
    rows = [{"turns": [f"question {number}"], "id": f"q{number}"} for number in range(40)]
    first = set(names(run(write(tmp_path, *rows), tmp_path, heldout=8), "heldout"))
    assert len(first) == 8
    assert set(names(run(write(tmp_path, *reversed(rows)), tmp_path, heldout=8), "heldout")) == first
    more = [*rows, {"turns": ["one more"], "id": "new"}]
    assert len(set(names(run(write(tmp_path, *more), tmp_path, heldout=8), "heldout")) & first) >= 7


def test_a_given_split_is_kept_and_cut_evenly_over_categories(tmp_path: Path) -> None:
    rows = [{"turns": [f"{kind} {number}"], "id": f"{kind}{number}", "category": kind, "split": "heldout"}
            for kind in ("code", "chat") for number in range(3)]
    rows.append({"turns": ["t"], "id": "t", "split": "train"})
    assert names(run(write(tmp_path, *rows), tmp_path, heldout=3), "heldout") == ["code0", "code1", "chat0"]
    filled = run(write(tmp_path, *rows, {"turns": ["u"], "id": "u"}), tmp_path, heldout=7)
    assert len(names(filled, "heldout")) == 7 and len(names(filled, "train")) == 1


def test_the_limit_takes_the_first_training_rows(tmp_path: Path) -> None:
    rows = [{"turns": [f"question {number}"]} for number in range(20)]
    unlimited = names(run(write(tmp_path, *rows), tmp_path, heldout=5), "train")
    assert names(run(write(tmp_path, *rows), tmp_path, limit=4, heldout=5), "train") == unlimited[:4]


@pytest.mark.parametrize(("limit", "heldout", "said"), [
    (None, 2, "prompts.heldout=2 leaves nothing.* 2 different prompts; hold out fewer, .*prompts.heldout=1"),
    (None, 5, "prompts.heldout=5"), (0, 1, "prompts.limit=0")])
def test_something_must_be_left_to_train_on(tmp_path: Path, limit: int | None, heldout: int,
                                            said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(write(tmp_path, {"turns": ["a"]}, {"turns": ["b"]}), tmp_path, limit=limit, heldout=heldout)


@pytest.mark.parametrize(("rows", "said"), [
    ([{"turns": ["a"]}], r"1 different prompt; give more of them \(prompts=jsonl prompts.source.path=FILE"),
    ([{"turns": ["a"]}, {"turns": ["a"]}], "1 different prompt; give more of them .* or hold out none"),
    ([{"turns": ["a"], "split": "heldout"}, {"turns": ["b"], "split": "heldout"}],
     'all 2 prompts of the source are marked "split": "heldout"')])
def test_why_nothing_is_left_is_told(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(write(tmp_path, *rows), tmp_path, heldout=1)


texts = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([None, "train", "heldout"])),
                 min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(0, 6))
def test_a_text_that_is_held_out_is_never_trained_on(marked: list[tuple[str, str | None]],
                                                     heldout: int) -> None:
    rows = [(Prompt(f"p{number}", (text,)), name) for number, (text, name) in enumerate(marked)]
    train, held = split(rows, heldout)
    asked = [prompt.turns for prompt in held]
    assert len(set(asked)) == len(asked) <= heldout
    assert not set(asked) & {prompt.turns for prompt in train}
    assert len(asked) == min(heldout, len({prompt.turns for prompt, _ in rows}))
    assert [prompt for prompt, name in rows if name != "heldout" and prompt.turns not in asked] == train, \
        "nothing else is lost"


def test_repeated_texts_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal turns under another system text are another prompt."""
    rows = [{"id": name, "turns": [text], "system": system, "split": part} for name, text, system, part in (
        ("a", "one", None, "train"), ("b", "one", None, "heldout"), ("c", "two", None, "train"),
        ("d", "two", None, "train"), ("e", "one", "Be brief.", "train"), ("f", "one", "", "heldout"))]
    out = tmp_path / "out"
    out.mkdir()
    record = Prompts(write(tmp_path, *rows), None, 1, 0.0, None, None, None).run({}, out)
    kept = read_prompts(out)
    assert (names(kept, "train"), names(kept, "heldout")) == (["c", "d", "e"], ["b"])
    assert (record["repeated"], record["left_out"], record["left_out_ids"]) == (3, 2, ["a", "f"])
    assert "3 rows repeat the text of an earlier one (a = b = f; c = d)" in capsys.readouterr().out


def test_the_built_in_prompts_have_a_split_of_their_own(tmp_path: Path) -> None:
    rows = Builtin().all_rows()
    train, heldout = ({prompt.id for prompt, name in rows if name == part} for part in ("train", "heldout"))
    assert len(heldout) >= 64 and len(train) >= 400 and len(train | heldout) == len(rows)


def test_the_built_in_prompts_come_through_as_they_are(tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """A change here makes every recipe's answers anew."""
    record = Prompts(Builtin(), None, 64, 0.0, None, None, None).run({}, tmp_path)
    assert (record["train"], record["heldout"], record["repeated"], record["left_out"]) == (1338, 64, 0, 0)
    assert capsys.readouterr().out == ""
    digest = hashlib.sha256((tmp_path / "prompts.jsonl").read_bytes()).hexdigest()
    assert digest == "c3ca5e42f867f82747d13b5bb61e6d44c0654739846589f32f8902b60e3b20d7"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers())), st.integers(1, 20))
def test_a_choice_is_spread_over_the_categories(items: list[tuple[str, int]], count: int) -> None:
    chosen = spread(items, count, lambda item: item[0])
    assert len(chosen) == min(count, len(items))
    assert not Counter(chosen) - Counter(items)
    for category in "abc":
        share = sum(item[0] == category for item in items) * len(chosen) / max(1, len(items))
        assert abs(sum(item[0] == category for item in chosen) - share) < 1
