"""The report on the data: its numbers, and a page that shows them and loads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.data.as_given import AsGiven
from trainer.data.duplicates import Duplicates
from trainer.data.prompts import Jsonl, Prompts
from trainer.data.report import JSON, PAGE, gather
from trainer.data.response_rows import read_rows
from trainer.data.responses import Stored
from trainer.data.tally import Tally
from trainer.target import Target

LONG = "a question that is long enough to be near to another one, number {}"
ROWS: list[Any] = [
    {"id": "a", "turns": ["2+2?"], "answers": ["<b>4</b>"], "category": "maths"},
    {"id": "b", "turns": ["¿Qué?", "and?"], "answers": ["no & yes", "z"], "language": "es"},
    {"id": "c", "turns": [LONG.format(1)], "answers": ["x"]},
    {"id": "d", "turns": [LONG.format(2)], "answers": ["x"]},
    {"id": "e", "turns": ["2+2?"], "answers": ["5"]},
    "not json",
    {"id": "f", "turns": ["w " * 300], "answers": ["y"]},
    {"id": "h", "turns": ["held out"], "answers": ["yes"], "split": "heldout"},
    {"id": "i", "turns": ["beyond the limit"], "answers": ["yes"]}]


@pytest.fixture
def folders(tmp_path: Path, tiny_target: Target) -> dict[str, Path]:
    """Finished stages of the rows, `i` beyond the limit and `f` too long."""
    source, prompts, responses = tmp_path / "rows.jsonl", tmp_path / "prompts", tmp_path / "responses"
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in ROWS))
    prompts.mkdir()
    responses.mkdir()
    Prompts(Jsonl(str(source)), 4, 1, 0.2, Duplicates(0.8), None, None).run({}, prompts)
    AsGiven(tiny_target, 300, None, None).run({"prompts": prompts}, responses)
    return {"prompts": prompts, "responses": responses}


def test_what_was_left_out_is_told_with_the_reason(folders: dict[str, Path]) -> None:
    data = json.loads((folders["responses"] / JSON).read_text())
    assert data["prompts"] == {"read": 9, "kept": 5, "train": 4, "heldout": 1, "repeated": 1}
    found = {each["why"]: (each["count"], each["examples"]) for each in data["left_out"]}
    [bad] = found.pop("is no conversation")[1]
    assert bad.startswith(f"{folders['prompts'].parent / 'rows.jsonl'}, line 6: not valid JSON")
    assert found == {"near a training text": (1, ["d = c"]), "repeats a training text": (1, ["e = a"]),
                     "not asked for (prompts.limit, prompts.heldout)": (1, []),
                     "longer than target.max_length": (1, ["f"])}
    assert data["prompts"]["read"] == data["prompts"]["kept"] + sum(
        each["count"] for each in data["left_out"] if not each["why"].startswith("longer"))


def test_numbers_are_those_of_the_rows(folders: dict[str, Path]) -> None:
    data = json.loads((folders["responses"] / JSON).read_text())
    rows = list(read_rows(folders["responses"]))
    lengths = sorted(len(row["tokens"]) for row in rows)
    assert (data["rows"], data["tokens"]) == (4, sum(lengths))
    assert data["supervised"] == sum(sum(row["mask"]) for row in rows)
    assert data["supervised_share"] == data["supervised"] / data["tokens"]
    shown = data["lengths"]["tokens of a row"]
    assert (shown["least"], shown["most"]) == (lengths[0], lengths[-1]) and shown["half"] in lengths
    assert sum(bar["rows"] for bar in data["histogram"]) == 4
    for bar in data["histogram"]:
        assert bar["rows"] == sum(bar["up_to"] // 2 < length <= bar["up_to"] for length in lengths)
    languages = {each["name"]: each for each in data["tags"]["language"]}
    assert {name: each["rows"] for name, each in languages.items()} == {"unknown": 3, "es": 1}
    assert (languages["unknown"]["train"], languages["unknown"]["heldout"]) == (2, 1)
    assert data["languages"] == {"said": 1, "detected": 0, "unknown": 7}
    assert sum(each["tokens"] for each in data["tags"]["category"]) == data["tokens"]
    assert data["tags"]["category"][0]["name"] == "chat" and data["tags"]["category"][1]["rows"] == 1
    trained = [len(row["tokens"]) for row in rows if row["split"] == "train"]
    shortest = next(1 << power for power in range(12) if 1 << power >= max(trained))
    assert [each["tokens"] for each in data["packing"]] == [shortest << more for more in range(4)]
    for each in data["packing"]:
        assert each["padding"] == pytest.approx(1 - sum(trained) / (each["tokens"] * each["rows"]))
    assert data["packing"][-1]["rows"] == 1 and data["off_policy"] is None


def test_three_rows_are_shown_as_they_are_learnt(folders: dict[str, Path], tiny_target: Target) -> None:
    data = json.loads((folders["responses"] / JSON).read_text())
    assert len(data["samples"]) == 3 and {each["category"] for each in data["samples"]} == {"chat", "maths"}
    rows = {row["id"]: row for row in read_rows(folders["responses"])}
    for sample in data["samples"]:
        row = rows[sample["id"]]
        text = "".join(part["text"] for part in sample["parts"])
        assert text == tiny_target.tokenizer.decode(row["tokens"])
        coloured = [part["text"] for part in sample["parts"] if part["supervised"]]
        assert len(coloured) == sum(flag and not before for flag, before in
                                    zip(row["mask"], [False, *row["mask"]], strict=False))
        assert all(text.endswith("<|im_end|>") for text in coloured)


def test_the_page_holds_it_all_and_loads_nothing(folders: dict[str, Path]) -> None:
    page = (folders["responses"] / PAGE).read_text()
    assert '<span class="good">&lt;b&gt;4&lt;/b&gt;&lt;|im_end|&gt;</span>' in page, "values are escaped"
    for text in ("<dt>language unknown</dt><dd>7</dd>", "near a training text",
                 "d = c", "rows.jsonl, line 6: not valid JSON", "By language",
                 "longer than target.max_length", "¿Qué?"):
        assert text in page
    assert "default-src 'none'" in page and "http" not in page.partition("<style>")[2]


def test_answers_from_elsewhere_have_a_report_too(folders: dict[str, Path], tiny_target: Target,
                                                  tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the prompts left out is not known there, and that is said."""
    out = tmp_path / "stored"
    out.mkdir()
    capsys.readouterr()
    Stored(tiny_target, str(folders["responses"])).run({}, out)
    data = json.loads((out / JSON).read_text())
    assert data["prompts"] is None and data["left_out"] == [] and data["rows"] == 4
    assert "what the prompts left out is not known" in (out / PAGE).read_text()
    printed = capsys.readouterr().out
    assert "category maths" in printed and "supervised, in %" in printed and PAGE in printed


def test_no_rows_make_a_report_without_samples(tiny_target: Target) -> None:
    found = gather(None, Tally(), {}, tiny_target)
    assert found["rows"] == found["tokens"] == 0 and found["samples"] == [] and found["histogram"] == []
    assert found["packing"] == []
