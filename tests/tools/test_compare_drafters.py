"""The table of several drafters: what is compared, and what is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import compare_drafters  # noqa: E402


def row(engine: str, k: int, length: float, speedup: float | None,
        dataset: str = "heldout") -> dict[str, Any]:
    rates = [(length - 1) * share for share in (0.75, 0.25)] + [0.0] * (k - 2)
    return {"dataset": dataset, "engine": engine, "num_speculative_tokens": k, "mean_accepted_length": length,
            "per_position_acceptance": rates, "speedup": speedup, "lossless": True, "prompts": 20,
            "output_tokens": 591}


@pytest.fixture
def reports() -> dict[str, dict[str, Any]]:
    def report(length: float) -> dict[str, Any]:
        return {"target": "tiny", "rows": [row("in_process", 3, length, None),
                                           row("in_process", 3, 9.0, None, "heldout/math"),
                                           row("vllm", 3, length, 1.1)],
                "stages": {"responses": {"fingerprint": "ab"}, "train": {"record": {
                    "steps": 100, "tokens": 5000, "parameters": 8_740_480, "train_seconds": 61.5}}}}
    return {"dflash": report(1.4), "eagle3": report(1.6)}


def test_the_longest_accepted_length_comes_first(reports: dict[str, dict[str, Any]]) -> None:
    assert compare_drafters.unequal(reports) == []
    rows = compare_drafters.rows_of(reports)
    assert [each["recipe"] for each in rows] == ["eagle3", "dflash"], "a slice of the prompts is no row"
    assert rows[0]["served_accepted_length"] == 1.6 and rows[0]["speedup"] == 1.1
    lines = compare_drafters.table(rows).splitlines()
    assert lines[2] == "| `eagle3` | 3 | 1.600 | 0.45 0.15 0.00 | 1.600 | 1.10× | identical | 8.7 M | 62 s |"
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("where", "key", "value", "named"), [
    ("train", "steps", 99, "train.steps differ: 100 in dflash, 99 in eagle3"),
    ("train", "tokens", 1, "the tokens that were trained on differ"),
    ("responses", "fingerprint", "cd", "that were learnt from differ: ab in dflash, cd in eagle3"),
    ("rows", "prompts", 8, "the prompts that were decoded differ: 20 in dflash, 8 in eagle3"),
    ("rows", "output_tokens", 400, "the tokens that were decoded (evaluate.sampling) differ: 591 in"),
    ("rows", "num_speculative_tokens", 2, "evaluate.k differ"),
])
def test_unequal_terms_are_named(reports: dict[str, dict[str, Any]], where: str, key: str, value: Any,
                                 named: str) -> None:
    other = copy.deepcopy(reports)
    stages = other["eagle3"]["stages"]
    node = {"rows": other["eagle3"]["rows"][0], "train": stages["train"]["record"],
            "responses": stages["responses"]}[where]
    node[key] = value
    (problem,) = compare_drafters.unequal(other)
    assert named in problem


@pytest.mark.parametrize("word", ["recipe=smoke", "drafter=eagle3", "run=[train]"])
def test_what_the_tool_decides_is_no_setting(word: str, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_drafters.py", "smoke", word])
    assert compare_drafters.main() == 2
    assert f"{word}: the tool itself decides that" in capsys.readouterr().err


def test_a_run_that_fails_ends_the_comparison(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_drafters.report_of("no_such_recipe", [])
    assert ended.value.code == 2
    assert "recipe=no_such_recipe ended with exit status 2" in capfd.readouterr().err
