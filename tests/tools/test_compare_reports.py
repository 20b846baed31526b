"""`tools/compare_reports.py`: runs beside each other, what keeps them apart, and what is none."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

for folder in ("tools", "tests/evaluate"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / folder))

import compare_reports  # noqa: E402
from test_traffic import row  # noqa: E402

from trainer.progress import exit_status  # noqa: E402


def report(steps: int, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"recipe": f"recipe{steps}", "target": "org/target", "verdict": f"trained for {steps} steps",
            "rows": rows, "gates": {"a/b": {"passed": steps > 50}}, **more,
            "training": {"steps": steps, "seconds": 90.0, "final": {"heldout_loss": 2.345}},
            "stages": {"responses": {"fingerprint": "ab"},
                       "train": {"record": {"steps": steps, "tokens": 9}}}}


def inside(k: int, **changes: Any) -> dict[str, Any]:
    return row(k, dataset="heldout", engine="in_process", baseline_tok_s=None, tok_s=None, speedup=None,
               prompts=20, **changes)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A folder of results whose sweep is apart, a report with its sweep, and rows of a method of its own."""
    root = tmp_path / "runs"
    for stage in ("report/a", "sweep/b", "evaluate/c"):
        (root / stage).mkdir(parents=True)
    swept = [row(k, users=users, ms_per_token=4.0, baseline_ms_per_token=5.0)
             for k in (1, 3) for users in (1, 4)]
    (root / "report/a/report.json").write_text(json.dumps(report(40, [inside(3)])))
    (root / "sweep/b/rows.json").write_text(json.dumps(swept))
    (root / "latest.json").write_text(json.dumps({
        name: f"/elsewhere/{name}/{folder}" for name, folder in
        (("report", "a"), ("sweep", "b"), ("evaluate", "c"))}))
    other = tmp_path / "other"
    other.mkdir()
    faster = [{**each, "baseline_tok_s": 120.0, "tok_s": 1.2 * each["tok_s"]} for each in swept]
    (other / "report.json").write_text(json.dumps(report(60, [inside(3, keep=0.6)], sweep=faster)))
    (tmp_path / "ngram.json").write_text(json.dumps([row(3, method="ngram", keep=0.3, users=1)]))
    return [root, other, tmp_path / "ngram.json"]


def call(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_reports", *map(str, words)])
    return exit_status(compare_reports.main, goes_on=False)


def test_runs_are_beside_each_other(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    root, other, ngram = runs
    out = tmp_path / "out"
    assert call(monkeypatch, root, f"longer={other}", ngram, "--out", out, "--title", "Three") == 0
    told = capsys.readouterr().out
    assert "train.steps differ: 40 in recipe40, 60 in longer." in told
    assert "(chat, 1 user, T=0 at 100.0 tokens/s in recipe40 and 120.0 in longer)" in told
    assert told.splitlines()[-1] == str(out / "comparison.html")
    found = json.loads((out / "comparison.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["recipe40", "longer", "ngram.json"]
    assert [(run["rows"], run["gates_failed"]) for run in found["runs"]] == [(5, 1), (5, 0), (1, 0)]
    methods = {each["method"] for each in found["rows"]}
    assert methods == {"dflash, recipe40", "dflash, longer", "ngram"}
    page = (out / "comparison.html").read_text()
    for shown in ("<h1>Three</h1>", "trained for 60 steps", "1 of 1 failed", "2.345", "dflash, longer",
                  "Throughput against latency", "chat, dflash, recipe40, K=3", "heldout, dflash, longer"):
        assert shown in page, shown
    drawn = {path.stem for path in (out / "files").glob("*.svg")}
    assert len(drawn) == page.count("<svg")
    assert drawn == {path.stem for path in (out / "files").glob("*.png")}
    with (out / "files/rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [each["run"] for each in rows] == ["recipe40"] * 5 + ["longer"] * 5 + ["ngram.json"]


def test_a_run_without_speeds_is_told(runs: list[Path]) -> None:
    (runs[0] / "sweep/b/rows.json").unlink()
    read = [compare_reports.read_run(str(each)) for each in (runs[0], runs[2])]
    [note] = compare_reports.notes(read, compare_reports.told_apart(read))
    assert note == ("recipe40 says nothing of speed-ups (1 rows with acceptance in process alone); measure "
                    "its drafter and plain decoding, of the same prompts (run=[sweep], or evaluate.server).")


def test_what_cannot_be_compared_is_one_sentence(runs: list[Path], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nameless.json").write_text("[{}]")
    (tmp_path / "broken.json").write_text(json.dumps([row(3, tok_s="fast")]))
    (tmp_path / "empty").mkdir()
    for words, said in (([runs[0], runs[0]], "several runs are called recipe40; name them apart, as in"),
                        ([tmp_path / "empty"], "empty has no measured rows; name a folder of results"),
                        ([tmp_path / "none"], "none has no measured rows"),
                        ([tmp_path / "nameless.json"], "nameless.json: row 0 lacks model, method, dataset"),
                        ([tmp_path / "broken.json"], "broken.json: row 0: tok_s is 'fast'"),
                        ([runs[2], "--out", runs[2] / "x"], "cannot be written (Not a directory)")):
        assert call(monkeypatch, *words) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1
