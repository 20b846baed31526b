"""`tools/bench_data.py` on a few conversations: the same ones every time, through the stages of a run, and
gone on with when it was stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import copied
from tool_calls import loaded

from trainer.data import as_given
from trainer.data.chat import Chat
from trainer.data.response_rows import read_samples
from trainer.errors import UserError
from trainer.target import Target


@pytest.fixture(scope="module")
def tool() -> Any:
    return loaded("bench_data")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two files of prompts."""
    folder = tmp_path / "prompts/inner"
    folder.mkdir(parents=True)
    texts = [f"Tell me more about the number {number} and its neighbours, please, in {number + 3} words."
             for number in range(40)]
    for name, own in (("a", texts[:25]), ("inner/b", texts[25:])):
        rows = "".join(json.dumps({"turns": [text]}) + "\n" for text in own)
        (tmp_path / f"prompts/{name}.jsonl").write_text(rows)
    return tmp_path / "prompts"


def call(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: Target,
         source: Path, work: Path, *more: str) -> dict[str, Any]:
    settings = ["target=folder", "target.name=tiny", "target.max_length=2048", "prompts.heldout=4",
                f"target.source.path={target.folder}", "target.mask_token='<|mask|>'",
                "target.tap_layers=[1,2]"]
    monkeypatch.setattr(sys, "argv", ["bench_data.py", str(source), "--conversations", "60",
                                      "--work", str(work), *more, *settings])
    assert tool.main() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def answers(work: Path) -> list[Path]:
    """The folders of finished stages."""
    return [path for path in (work / "runs/responses").iterdir() if (path / "stage.json").exists()]


def test_a_conversation_depends_on_its_number_alone(tool: Any) -> None:
    found = [f"{number} b c d e" for number in range(30)]
    many = [*tool.conversations(found, 400)]
    assert [*tool.conversations(found, 50)] == many[:50]
    assert {len(row["turns"]) for row in many} == {1, 2, 3}
    assert all(len(row["turns"]) == len(row["answers"]) for row in many)
    texts = [json.dumps(row["turns"]) for row in many]
    assert 400 > len({*texts}) > 360, "some are there again"
    assert sorted(many[0]["turns"][0].split()) in [sorted(text.split()) for text in found]


def test_it_measures_and_says_what_was_left_out(tool: Any, monkeypatch: pytest.MonkeyPatch, source: Path,
                                                capsys: pytest.CaptureFixture[str], tiny_target: Target,
                                                tmp_path: Path) -> None:
    target = copied(tiny_target, tmp_path / "target")
    work = tmp_path / "work"
    found = call(tool, monkeypatch, capsys, target, source, work)
    [folder] = answers(work)
    samples = read_samples(folder, "train")
    assert (found["samples"], found["tokens"]) == (len(samples), sum(len(each.tokens) for each in samples))
    assert found["padding"] == round(1 - found["tokens"] / (2048 * found["packed_rows"]), 4)
    assert 60 - 4 - len(samples) == sum(found["left_out"].values())
    assert found["peak_rss_mib"] >= found["rss_before_mib"] > 50
    assert {*found["seconds"]} == {"prompts", "responses", "read", "pack"}
    assert found["conversations_per_second"] > 0
    again = call(tool, monkeypatch, capsys, target, source, work)
    assert again["seconds"]["prompts"] is again["seconds"]["responses"] is again["whole_seconds"] is None
    assert {name: again[name] for name in ("tokens", "left_out", "padding")} == {
        name: found[name] for name in ("tokens", "left_out", "padding")}


def test_a_call_that_was_stopped_goes_on(tool: Any, monkeypatch: pytest.MonkeyPatch, source: Path,
                                         capsys: pytest.CaptureFixture[str], tiny_target: Target,
                                         tmp_path: Path) -> None:
    target = copied(tiny_target, tmp_path / "target")
    whole = call(tool, monkeypatch, capsys, target, source, tmp_path / "whole")
    seen: list[str] = []
    given = Chat.given
    monkeypatch.setattr(as_given, "COMMIT", 5)

    def watched(chat: Chat, prompt: Any) -> Any:
        seen.append(prompt.id)
        if len(seen) == 23:
            raise KeyboardInterrupt
        return given(chat, prompt)

    monkeypatch.setattr(Chat, "given", watched)
    with pytest.raises(KeyboardInterrupt):
        call(tool, monkeypatch, capsys, target, source, tmp_path / "parts")
    found = call(tool, monkeypatch, capsys, target, source, tmp_path / "parts")
    assert len(seen) == len({*seen}) + 1, "none is tokenised twice but the one that was under way"
    assert found["tokens"] == whole["tokens"] and found["seconds"]["prompts"] is None
    [one], [other] = answers(tmp_path / "whole"), answers(tmp_path / "parts")
    assert (one / "responses.jsonl").read_bytes() == (other / "responses.jsonl").read_bytes()


def test_what_cannot_be_used_is_said(tool: Any, monkeypatch: pytest.MonkeyPatch, source: Path,
                                     capsys: pytest.CaptureFixture[str], tiny_target: Target,
                                     tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no prompt; give a JSONL file"):
        tool.questions(tmp_path / "empty")
    target = copied(tiny_target, tmp_path / "target")
    with pytest.raises(UserError, match=r"a row has \d+ tokens, and packed rows 20; say --tokens \d+ or"):
        call(tool, monkeypatch, capsys, target, source, tmp_path / "work", "--tokens", "20")
