"""Prompts from Parquet files and from data sets: which columns are read, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from trainer.data.tables import Datasets, Parquet
from trainer.errors import UserError
from trainer.records import Prompt

TABLE = [{"question": "one?", "turns": ["a", "b"], "topic": "maths",
          "talk": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
          "said": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
         {"question": "two?", "turns": ["c"], "topic": "chat", "talk": [{"role": "user", "content": "z"}],
          "said": [{"from": "human", "value": "i"}, {"from": "gpt", "value": "j"}]}]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE))
    return tmp_path / "set"


def data_set(folder: Path | str, column: str | None = None, columns: dict[str, str] | None = None,
             split: str = "train", revision: str | None = None, streaming: bool = False,
             first: int | None = None) -> Datasets:
    return Datasets(str(folder), None, split, column, columns or {}, revision, streaming, first)


def write(path: Path, *rows: dict[str, Any]) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("column", "expected"), [
    ("question", [Prompt("row-1", ("one?",)), Prompt("row-2", ("two?",))]),
    ("turns", [Prompt("row-1", ("a", "b")), Prompt("row-2", ("c",))]),
    (None, [Prompt("row-1", ("a", "b")), Prompt("row-2", ("c",))]),
    ("talk", [Prompt("row-1", ("x",), answers=("y",)), Prompt("row-2", ("z",))]),
    ("said", [Prompt("row-1", ("h",), answers=("g",)), Prompt("row-2", ("i",), answers=("j",))])])
def test_a_column_of_a_data_set_holds_texts_turns_or_messages(
        folder: Path, column: str | None, expected: list[Prompt], streaming: bool) -> None:
    source = data_set(folder, column, streaming=streaming)
    assert source.all_rows() == [(prompt, None) for prompt in expected]


def test_columns_say_what_holds_what(folder: Path) -> None:
    source = data_set(folder, columns={"turns": "question", "category": "topic"}, first=1)
    assert source.all_rows() == [(Prompt("row-1", ("one?",), category="maths"), None)]


@pytest.mark.parametrize(("settings", "said"), [
    ({"column": "answer"}, "prompts.source.column answer is not in .*; it has question, turns, topic, talk"),
    ({"columns": {"turns": "answer"}}, "prompts.source.columns.turns: the column answer is not in .*; it"),
    ({"columns": {"text": "question"}}, "prompts.source.columns has the key text; a row has id, turns"),
    ({"split": "test"}, r"prompts.source.name .* \(split test\) cannot be loaded")])
def test_a_data_set_without_what_is_asked_for_is_named(folder: Path, settings: dict[str, Any],
                                                       said: str) -> None:
    with pytest.raises(UserError, match=said):
        data_set(folder, **settings).all_rows()


def test_a_local_data_set_is_known_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "one?"}\n')
    source = data_set(tmp_path, "question")
    before = source.fingerprint()
    assert source.fingerprint() == before
    path.write_text('{"question": "two?"}\n')
    changed = source.fingerprint()
    path.rename(tmp_path / "other.jsonl")
    assert len({before, changed, source.fingerprint()}) == 3


@pytest.mark.parametrize("revision", [None, "main", "3f2a1b"])
def test_a_data_set_of_the_hub_is_known_by_a_commit(monkeypatch: pytest.MonkeyPatch,
                                                    revision: str | None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert data_set("someone/set", "question", revision=COMMIT).fingerprint() == COMMIT
    with pytest.raises(UserError, match=f"source.revision={revision} is no commit, .* newest commit on its"):
        data_set("someone/set", "question", revision=revision).fingerprint()


def test_parquet_files_are_read_in_order_as_one_source(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"turns": ["third"], "note": 1})
    write(tmp_path / "a.parquet", {"turns": ["first"], "note": 1}, {"turns": ["second"], "note": 2})
    source = Parquet(f"{tmp_path}/*.parquet", {})
    assert source.all_rows() == [(Prompt(f"row-{number}", (text,)), None)
                                 for number, text in enumerate(("first", "second", "third"), 1)]
    before = source.fingerprint()
    write(tmp_path / "b.parquet", {"turns": ["fourth"], "note": 1})
    assert source.fingerprint() != before


def test_messages_in_parquet_have_nulls_for_what_they_lack(tmp_path: Path) -> None:
    """A struct has the fields of all rows; null means absent."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    write(tmp_path / "a.parquet", {"messages": [
        {"role": "user", "content": "Rain?", "tool_calls": None, "tool_call_id": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "yes", "tool_calls": None, "tool_call_id": "c"}]})
    [(prompt, _)] = Parquet(str(tmp_path / "a.parquet"), {}).all_rows()
    assert prompt.turns == ("Rain?", "yes") and prompt.answers == ("",)
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}]}


def test_a_bad_row_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"turns": ["good"]}, {"turns": [" "]})
    bad: list[str] = []
    assert len(Parquet(str(tmp_path / "a.parquet"), {}).rows(bad)) == 1
    assert len(bad) == 1 and bad[0].startswith(f"{tmp_path / 'a.parquet'}, row 2: \"turns\" must be a list")


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no file; give a Parquet file, or a pattern"):
        Parquet(str(tmp_path / "none*"), {}).fingerprint()
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(UserError, match="text.parquet cannot be read as Parquet"):
        Parquet(str(tmp_path / "text.parquet"), {}).all_rows()
    write(tmp_path / "a.parquet", {"turns": ["good"]})
    write(tmp_path / "other.parquet", {"text": "good"})
    with pytest.raises(UserError, match=r"none of the columns of .*other.parquet \(text\) is called as a"):
        Parquet(str(tmp_path / "other.parquet"), {}).all_rows()
    with pytest.raises(UserError, match="columns.turns: the column talk is not in .*a.parquet; it has turns"):
        Parquet(str(tmp_path / "a.parquet"), {"turns": "talk"}).all_rows()
