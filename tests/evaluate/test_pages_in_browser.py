"""The pages of a report and of a sweep, opened in a real browser as on a phone and on a desk."""

from __future__ import annotations

import json
from pathlib import Path

import browser
import pytest
from browser import DESK, PHONE
from test_report import make_report, make_run

from trainer.evaluate import html, sweep_view

PUBLISHED = Path(__file__).with_name("published_sweeps.json")

def swept() -> list[dict]:
    """Two methods, two numbers of users, repeats and latencies; with sixteen users speculation loses."""
    published = [row for row in json.loads(PUBLISHED.read_text())
                 if row["model"].endswith("26B-A4B-it") and row["method"] in ("EAGLE-3", "DFlash")]
    rows = []
    for users, share in ((1, 1.0), (16, 0.4)):
        for row in published:
            plain, speed = row["baseline_tok_s"] * users, row["tok_s"] * users * share
            rows.append({**row, "users": users, "temperature": 0.0, "baseline_tok_s": plain, "tok_s": speed,
                         "speedup": speed / plain, "tok_s_repeats": [0.96 * speed, speed, 1.02 * speed],
                         "baseline_tok_s_repeats": [plain, 1.03 * plain], "lossless": True,
                         "ms_per_token": 1000 * users / speed, "baseline_ms_per_token": 1000 * users / plain,
                         "attention_backend": "TRITON_ATTN"})
    return rows


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """The file of each page, and how many plots it has."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "report").mkdir()
    make_report().run(make_run(folder / "run"), folder / "report")
    found = {"report": (folder / "report/report.html", 5 + 2 + 2 + 5)}
    published = [row for row in json.loads(PUBLISHED.read_text())
                 if row["method"] == "DSpark" or "Qwen3.5-27B" in row["model"]]
    for name, rows, plots in (("sweep", swept(), 2 + 8 + 4 + 1 + 2 * 5),
                              ("published", published, 2 * 3 + 12 + 1 + 4 * 4)):
        file = folder / f"{name}.html"
        file.write_text(html.render_sweep(shown := sweep_view.view(rows), name))
        found[name] = file, plots
    run = {"name": "a" * 40, "target": "org/target", "methods": ["EAGLE-3", "DFlash"], "rows": 9, "gates": 3,
           "verdict": "accepted length 1.52 at K=3, 1.21x plain decoding at 1 user", "gates_failed": 1,
           "heldout_loss": 2.5, "steps": 400, "training_seconds": 90.0}
    file = folder / "comparison.html"
    file.write_text(html.render_comparison(shown, {"runs": [run], "notes": ["b" * 60]}, "comparison"))
    return {**found, "comparison": (file, plots)}


@pytest.mark.parametrize("name", ["report", "sweep", "published", "comparison"])
@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (PHONE, True), (DESK, False)])
def test_a_page_is_whole_and_readable(chromium: browser.Browser, pages: dict[str, tuple[Path, int]],
                                      name: str, width: int, dark: bool) -> None:
    file, plots = pages[name]
    browser.require_readable(chromium, file, width, dark)
    drawn = chromium.do(browser.PLOTS)
    assert len(drawn) == plots
    assert [title for title, *sizes, texts in drawn if min(sizes) < 60 or not texts] == []


def test_what_cannot_be_read_is_found(chromium: browser.Browser, tmp_path: Path) -> None:
    """The checks above can fail: small and overlapping text, a wide page, errors, what comes from outside."""
    file = tmp_path / "bad.html"
    file.write_text('<!doctype html><meta name="viewport" content="width=device-width"><body>'
                    '<div style="width: 900px; font-size: 9px">small</div>'
                    '<svg viewBox="0 0 200 100" width="100">'
                    '<title>t</title><text x="5" y="20">one</text><text x="6" y="21">two</text></svg>'
                    '<img src="file:///nowhere.png"><script>console.error("wrong"); missing()</script>')
    chromium.open(file, PHONE)
    assert {text for text, _ in chromium.do(browser.SMALL_TEXT)} == {"small", "one", "two"}
    assert chromium.do(browser.OVERLAPPING) == [["t", "one", "two"]]
    assert chromium.do("document.documentElement.scrollWidth") > PHONE
    errors = chromium.errors()
    assert any("wrong" in each for each in errors) and any("missing" in each for each in errors)
    assert "file:///nowhere.png" in chromium.requests()
