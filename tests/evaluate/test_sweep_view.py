"""The page of a sweep: what it says of each row and class, and what it does with rows that say less."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_report import ODD, Page, make_row, make_rows, make_run

from trainer import pipeline
from trainer._paths import find
from trainer.check import check
from trainer.compose import compose_configuration
from trainer.errors import UserError
from trainer.evaluate import html
from trainer.evaluate.report import Report
from trainer.evaluate.sweep_view import NO_BASELINE, measured, view

PUBLISHED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("published_sweeps.json").read_text())


def sweep(method: str = "eagle3", users: int | None = 1, speedups: tuple[float, ...] = (1.2, 0.9),
          **changes: object) -> list[dict[str, Any]]:
    """Rows of K = 1, 2, ... with these speed-ups."""
    return [make_row([0.6, 0.4, 0.2][:k], method=method, users=users, baseline_tok_s=50.0, tok_s=50.0 * each,
                     speedup=each, **changes) for k, each in enumerate(speedups, 1)]


def words(svg: str) -> list[str]:
    return [text for each in ElementTree.fromstring(svg).iter("text") if (text := "".join(each.itertext()))]


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    rows = [row for row in PUBLISHED if "Qwen3.5" in row["model"]]
    return view(rows)


def test_all_that_was_published_is_shown_where_it_belongs(published: dict[str, Any]) -> None:
    rows = [row for row in PUBLISHED if "Qwen3.5" in row["model"]]
    assert [target["model"] for target in published["targets"]] == list(dict.fromkeys(
        row["model"] for row in rows))
    assert published["losing"] == sum(row["tok_s"] < row["baseline_tok_s"] for row in rows) > 0
    assert (published["points"], published["left_out"]) == (len(rows), {})
    shown = [row for target in published["targets"] for each in target["drafters"] for row in each["rows"]]
    assert len(shown) == len(rows)
    assert sum(row["loses"] for row in shown) == published["losing"]
    for target in published["targets"]:
        speedups, speeds = (words(drawn) for _, drawn in target["bars"])
        assert speedups.count("plain decoding") == speeds.count("plain decoding") == 1
        assert {f"{line['plain']:,.1f}" for line in target["comparison"]} <= {*speeds}
        assert (target["positions"] is not None) == (len(target["methods"]) > 1)
        for line in target["comparison"]:
            own = [row for row in rows if (row["model"], row["dataset"]) == (target["model"], line["name"])]
            for method, cell in zip(target["methods"], line["cells"], strict=True):
                best = max((row for row in own if row["method"] == method),
                           key=lambda row: row["tok_s"] / row["baseline_tok_s"])
                assert cell["k"] == best["num_speculative_tokens"]
                assert cell["loses"] == (best["tok_s"] < best["baseline_tok_s"])


def test_cells_say_where_speculation_loses_and_what_is_picked(published: dict[str, Any]) -> None:
    for target in published["targets"]:
        for drafter in target["drafters"]:
            drawn = words(drafter["speedups"])
            assert drawn.count("loses") == sum(row["loses"] for row in drafter["rows"])
            assert drawn.count("pick") == sum(own["picked"] for own in drafter["classes"])
            for own in drafter["classes"]:
                assert own["speculate"] or own["best"]["speedup"] < 1.02
            fits = [text for _, svg in drafter["costs"] for text in words(svg) if "K" in text and "+" in text]
            assert fits == [f"{own['dataset']}: {own['round_cost']['intercept']:.2f} + "
                            f"{own['round_cost']['slope']:.3f} K" for own in drafter["classes"]]


def test_users_and_repeats_have_figures_and_numbers_of_their_own() -> None:
    timed = {"tok_s_repeats": [58.0, 60.0, 63.0], "ms_per_token": 20.0, "baseline_ms_per_token": 25.0}
    found = view([*sweep(users=1, **timed), *sweep(users=4, temperature=0.7)])
    [target] = found["targets"]
    assert [title for title, _ in target["throughput"]] == ["heldout, 1 user", "heldout, 4 users, T=0.7"]
    assert target["latency"] == []  # one number of users says nothing of how they share
    assert "below: speculation loses" in words(target["throughput"][0][1])
    [drafter] = target["drafters"]
    assert drafter["rows"][0]["repeats"] == "58.0 to 63.0" and drafter["rows"][2]["repeats"] == ""
    assert [title for title, _ in drafter["costs"]] == ["1 user", "4 users, T=0.7"]
    assert [title for title, _ in drafter["lengths"]] == ["all traffic", "T=0.7"]
    [target] = view([*sweep(users=1, **timed), *sweep(users=4, **timed)])["targets"]
    [(title, svg)] = target["latency"]
    assert title == "heldout: 1, 4 users" and "plain decoding" in words(svg)


def test_rows_that_say_less_are_told_and_stay_in_the_table() -> None:
    unknown = sweep("suffix", speedups=(1.0,), attention_backend="FLASH")
    unknown[0] |= {"baseline_tok_s": None, "speedup": None}
    found = view([*sweep(speedups=(1.3,)), *unknown])
    assert found["left_out"] == {"no plain speed": 1} and found["losing"] == 0
    text = Page(html.render_sweep(found, "a title")).text
    for shown in ("1 row with no plain speed: in the table of rows alone",
                  "no slower than plain decoding at any", "suffix", "FLASH", "a title"):
        assert shown in text, shown
    [target] = found["targets"]
    assert target["methods"] == ["eagle3"] and target["drafters"][1]["tuned"] is None
    alone = Page(html.render_sweep(view(unknown), "t")).text
    assert "suffix" in alone and "Throughput against K" not in alone


def test_a_page_is_sound_and_loads_nothing(published: dict[str, Any]) -> None:
    rows = sweep(f"[m] {ODD}", dataset=ODD, model="<b>org</b>/$x$")
    for found in (published, view(rows)):
        text = html.render_sweep(found, ODD)
        page = Page(text)
        assert len(page.ids) == len(set(page.ids))
        assert {reference.removeprefix("#") for reference in page.references} <= set(page.ids)
        assert not re.search(r"https?://|@import|<link|<iframe|<b>org", text)
        titled = re.findall(r'<svg[^>]* role="img" aria-labelledby="(\S+) (\S+)"', text)
        assert len(titled) == text.count("<svg")
        assert {name for pair in titled for name in pair} <= set(page.ids)
    assert ODD in page.text and f"[m] {ODD} for <b>org</b>/$x$" in page.text


def test_rows_without_names_or_with_values_that_are_none_are_refused() -> None:
    nameless = make_row([0.5])
    del nameless["dataset"]
    with pytest.raises(UserError, match="row 1 lacks dataset, expected the names"):
        view([make_row([0.5]), nameless])
    with pytest.raises(UserError, match="tok_s is -1, expected a speed above 0"):
        view([make_row([0.5], tok_s=-1)])


def test_an_evaluation_of_several_k_is_a_sweep_too() -> None:
    rows = make_rows()
    assert measured(rows) == [row for row in rows if row["engine"] == "vllm"]
    assert measured([row for row in rows if row["num_speculative_tokens"] == 3]) == []
    assert measured([row | {"speedup": None} for row in rows]) == []


def test_a_report_shows_the_rows_of_the_sweep(tmp_path: Path) -> None:
    folders = {**make_run(tmp_path, rows=[make_row([0.4])], steps=2), "sweep": tmp_path / "sweep"}
    out = tmp_path / "out"
    for folder in (folders["sweep"], out):
        folder.mkdir()
    (folders["sweep"] / "rows.json").write_text(json.dumps(sweep("ngram", users=4)))
    content = json.loads((folders["evaluate"] / "stage.json").read_text())
    (folders["sweep"] / "stage.json").write_text(json.dumps({**content, "stage": "sweep"}))
    Report("r", "vllm", 0.02, 0.002, files=True).run(folders, out)
    text = Page((out / "report.html").read_text()).text
    assert "ngram" in text and "Speculation loses at 1 of 2 measured points" in text
    report = json.loads((out / "report.json").read_text())
    assert "sweep" in report["stages"] and report["sweep"] == sweep("ngram", users=4)
    drawn = sorted(path.name for path in (out / "files").iterdir())
    assert len(drawn) == 2 * (out / "report.html").read_text().count("<svg") + 1 and drawn[-1] == "rows.csv"


def test_methods_are_beside_each_other_by_position() -> None:
    """Of each the longest K, served rather than in process."""
    rows = [*sweep(), *sweep("ngram", speedups=(1.1,)), make_row([0.9, 0.1, 0.0], engine="in_process",
                                                                 method="ngram", speedup=None, tok_s=None)]
    [target] = view(rows)["targets"]
    drawn = words(target["positions"])
    assert [name for name in drawn if "K=" in name] == ["heldout, eagle3, K=2", "heldout, ngram, K=1"]
    assert view(sweep())["targets"][0]["positions"] is None
    alone = view([{**row, "tok_s": None, "speedup": None} for row in rows])
    assert alone["notes"] == [NO_BASELINE] and alone["targets"][0]["positions"] is not None
    [single] = view([{**row, "prompts": 1} for row in rows])["notes"]
    assert single.startswith("One prompt of heldout was measured")


def test_a_report_uses_a_sweep_that_is_finished_and_needs_none() -> None:
    """A sweep that is not run is not checked either: here for more users than the server takes."""
    configuration = compose_configuration(["recipe=smoke", "engine.max_num_seqs=2"], find())
    assert check(configuration, find().groups(), pipeline.Stage) == []
    assert pipeline.check(configuration.settings) == {}
    settings = {**configuration.settings, "run": ["sweep"]}
    assert list(pipeline.check(settings)) == ["sweep.users.1"]
    report = pipeline.build(configuration.settings["report"], "report")
    assert report.uses == ("sweep",) and report.serve_with == "vllm"
