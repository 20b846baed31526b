"""`tools/sweep_page.py` as from a shell."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from tool_calls import loaded

from trainer.progress import exit_status

PROJECT = Path(__file__).parents[2]
ROWS = json.loads((PROJECT / "tests/evaluate/published_sweeps.json").read_text())[:5]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    module = loaded("sweep_page")
    monkeypatch.setattr(sys, "argv", ["sweep_page", *map(str, arguments)])
    return exit_status(module.main, goes_on=False)


def test_a_page_lies_beside_its_rows_or_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}))
    assert call(monkeypatch, tmp_path / "rows.json") == 0
    assert call(monkeypatch, tmp_path / "rows.json", tmp_path / "page.html", "--title", "Mine") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'rows.html'}\n{tmp_path / 'page.html'}\n"
    assert "<h1>Sweep of draft lengths</h1>" in (tmp_path / "rows.html").read_text()
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Mine</h1>" in text and "Gemma 4 MTP" in text and "4,060" in text


def test_figures_and_rows_are_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert call(monkeypatch, tmp_path / "rows.json", "--files", tmp_path / "files") == 0
    drawn = sorted((tmp_path / "files").glob("*.svg"))
    assert len(drawn) == (tmp_path / "rows.html").read_text().count("<svg") == 7
    assert drawn[3].name == "004-gemma-4-mtp-for-google-gemma-4-26b-a4b-it-speed-up.svg"
    for each in drawn:
        with Image.open(each.with_suffix(".png")) as picture:
            assert min(picture.size) > 200 and len(picture.convert("RGB").getcolors(1 << 20)) > 10
        assert ElementTree.parse(each).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    with (tmp_path / "files/rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [float(row["tok_s"]) for row in found] == [row["tok_s"] for row in ROWS]


def test_what_is_no_sweep_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows, out = tmp_path / "rows.json", tmp_path / "none/page.html"
    for content, arguments, expected in (("[]", [], "holds no rows"), ("{}", [], "holds no list of rows"),
                                         ("[{}]", [], "row 0 lacks model, method, dataset"),
                                         (json.dumps(ROWS), [out], "page.html cannot be written (No such")):
        rows.write_text(content)
        assert call(monkeypatch, rows, *arguments) == 2
        err = capsys.readouterr().err
        assert expected in err and len(err.splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"]
