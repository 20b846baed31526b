"""`tools/draft_vocabulary.py` on answers whose shares are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import write_responses
from tool_calls import loaded

from trainer.records import Sample


@pytest.fixture(scope="module")
def tool() -> Any:
    return loaded("draft_vocabulary")


@pytest.fixture
def call(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls it as from a shell, in this process: status, output, errors."""
    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draft_vocabulary.py", *map(str, arguments)])
        return tool.main(), *capsys.readouterr()

    return called


def cells(out: str) -> dict[str, list[str]]:
    return {parts[0]: parts[1:] for line in out.splitlines() if line.startswith("│")
            for parts in [[part.strip() for part in line.split("│")[1:-1]]]}


def test_it_counts_supervised_training_tokens_alone(call: Any, tmp_path: Path) -> None:
    """1,500 tokens once, one token 1,500 times; the prompt and what is held out count nothing."""
    answer = (*range(10, 1510), *[5000] * 1500)
    samples = [Sample("a", (9000, 9001, *answer), (False, False, *[True] * len(answer))),
               Sample("b", (7, 8000), (False, True))]
    folder = write_responses(tmp_path / "responses/0123", samples, heldout=1)
    (tmp_path / "latest.json").write_text(json.dumps({"responses": str(folder)}))
    for given in (folder, tmp_path):
        status, out, err = call(given, "--size", "101")
        assert status == 0 and err == ""
        assert "3,000 supervised tokens in 1 samples, 1,501 distinct" in out
        found = cells(out)
        assert found["101"] == ["53.33%", "466.67", "0"]
        assert found["1,024"] == [f"{2523 / 3000:.2%}", f"{1000 * 477 / 3000:.2f}", "0"]
        assert found["2,048"] == ["100.00%", "0.00", "547"]
        assert found["8,192"][2] == "6,691"
        assert found["90.0%"] == ["1,201"] and found["100.0%"] == ["1,501"]
    (folder / "stage.json").write_text(json.dumps({"record": {"vocabulary": 2048}}))
    found = cells(call(folder, "--size", "2049")[1])
    assert "2,048" in found and not {"2,049", "4,096", "8,192"} & found.keys(), "the target has no more"


def test_each_category_has_a_column(call: Any, tmp_path: Path) -> None:
    """Of the 101 most frequent tokens of all."""
    samples = [Sample("a", (1, *[5000] * 300, *range(10, 110)), (False, *[True] * 400), "chat"),
               Sample("b", (1, *range(60, 260)), (False, *[True] * 200), "code")]
    status, out, _ = call(write_responses(tmp_path, samples), "--size", "101")
    assert status == 0 and "tokens covered, by category" in out
    rows = [line for line in out.splitlines() if line.startswith("│ 101 ")]
    covered = 50 + 50  # said twice, then the lowest ids that were said once
    assert [part.strip() for part in rows[1].split("│")[2:-1]] == [
        f"{(300 + covered) / 400:.2%}", f"{50 / 200:.2%}"]
    assert "by category" not in call(write_responses(tmp_path / "one", samples[:1]))[1]


def test_no_answers_are_one_sentence(call: Any, tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        status, out, err = call(folder)
        assert status == 1 and out == "" and "has no responses.jsonl; give" in err
    write_responses(tmp_path / "held", [Sample("b", (7, 8), (False, True))], heldout=1)
    status, out, err = call(tmp_path / "held")
    assert status == 1 and out == "" and "no supervised training token" in err
