"""Several runs beside each other: acceptance by position, throughput and speed-up by method beside plain
decoding, latency against throughput, and on which terms they were made.

    python tools/compare_reports.py [NAME=]PLACE ... [--out FOLDER] [--title TEXT]

PLACE is a folder of results (run_root, whose newest report and sweep count), the folder of one finished
report, sweep or evaluate, or a file of rows. A run is called NAME, or by its recipe, or else by its folder.
Methods that several runs have are told apart by the names of the runs.

Writes comparison.html, which loads nothing, comparison.json, and into the folder files every figure as SVG
and PNG, and rows.csv; all into --out, or else the current folder. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer._folders import write_json  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.evaluate import html, sweep_view  # noqa: E402
from trainer.evaluate.files import write_files  # noqa: E402
from trainer.evaluate.finished_stages import read_json  # noqa: E402
from trainer.evaluate.traffic import CLASS, grouped, read_rows, usable  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

Row = dict[str, Any]
EQUAL = {"target": "the target", "responses": "the answers that were learnt from", "steps": "train.steps",
         "tokens": "the tokens that were trained on", "prompts": "the prompts that were decoded",
         "decoded": "the tokens that were decoded (evaluate.sampling)",
         "lengths": "evaluate.k"}
APART = 0.05  # plain speeds of the same traffic that differ by more were measured on machines in other states


@dataclass(frozen=True)
class Run:
    """`report` is the content of its report.json; {} where there is a sweep alone."""

    name: str
    place: Path
    report: dict[str, Any]
    rows: list[Row]


def read_run(word: str) -> Run:
    """What lies at a place; raises UserError where there is neither a report nor rows."""
    name, _, given = word.rpartition("=")
    place = Path(given)
    reports, measured = _files(place)
    report = read_json(reports[0]) if reports else {}
    rows = [*(read_rows(reports[0]) if reports else []), *report.get("sweep", [])]
    if not report.get("sweep"):
        rows += [row for path in measured for row in read_rows(path)]
    if not rows:
        raise UserError(f"{place} has no measured rows; name a folder of results with a finished report or "
                        "sweep (run=[sweep,report]), one of these folders, or a file of rows")
    try:
        sweep_view.require_names(rows)
        usable(rows)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return Run(name or report.get("recipe") or place.resolve().name, place, report, rows)


def _files(place: Path) -> tuple[list[Path], list[Path]]:
    """The report.json and the rows.json of a place, as far as there are any."""
    if place.is_file():
        report = place.name == "report.json"
        return [place] * report, [place] * (not report)
    known = read_json(place / "latest.json") if (place / "latest.json").is_file() else {}
    folders = [place, *(place / stage / Path(known[stage]).name
                        for stage in ("report", "sweep") if stage in known)]
    return ([path for each in folders if (path := each / "report.json").is_file()],
            [path for each in folders if (path := each / "rows.json").is_file()])


def told_apart(runs: Sequence[Run]) -> list[Row]:
    """All rows with their `run`; a method that several runs measured for a target has the run in its name."""
    makers: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for row in run.rows:
            makers.setdefault((row["model"], row["method"]), set()).add(run.name)
    return [{**row, "run": run.name} | ({} if len(makers[row["model"], row["method"]]) < 2 else
                                        {"method": f"{row['method']}, {run.name}"})
            for run in runs for row in run.rows]


def facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in all reports that are compared, as far as a report says it."""
    stages = report.get("stages", {})
    train, rows = stages.get("train", {}).get("record", {}), heldout(report, "in_process")
    return {"target": report.get("target"), "responses": stages.get("responses", {}).get("fingerprint"),
            "steps": train.get("steps"), "tokens": train.get("tokens"),
            "prompts": rows[0].get("prompts") if rows else None,
            "decoded": rows[0].get("output_tokens") if rows else None,
            "lengths": [row["num_speculative_tokens"] for row in rows] or None}


def heldout(report: Mapping[str, Any], engine: str) -> list[Row]:
    return [row for row in report.get("rows", [])
            if row["dataset"] == "heldout" and row.get("engine") == engine]


def unequal(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for every fact in which a report differs from the first."""
    (first, one), *others = ((name, facts(report)) for name, report in reports.items())
    return [f"{what} differ: {one[key]} in {first}, {other[key]} in {name}" for name, other in others
            for key, what in EQUAL.items() if one[key] != other[key] and None not in (one[key], other[key])]


def notes(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """What keeps the runs from being compared in all that they say."""
    found = [f"Not on equal terms: {each}." for each in unequal({run.name: run.report for run in runs})]
    for run in runs:
        kept, lacking = usable(run.rows)
        if not kept:
            reasons = ", ".join(f"{count} rows with {why}" for why, count in lacking.items())
            found.append(f"{run.name} says nothing of speed-ups ({reasons}); measure its drafter and plain "
                         "decoding, of the same prompts (run=[sweep], or evaluate.server).")
    return found + _apart(usable(rows)[0])


def _apart(rows: Sequence[Row]) -> list[str]:
    """A sentence where plain decoding of the same traffic was not as fast in all runs."""
    found, classes = [], grouped(rows, ("model", *CLASS)).values()
    for own in classes:
        plain = {name: sum(row["baseline_tok_s"] for row in same) / len(same)
                 for (name,), same in grouped(own, ["run"]).items()}
        slow, fast = (pick(plain, key=plain.__getitem__) for pick in (min, max))
        found.append((plain[fast] / plain[slow], f"{sweep_view.class_of(own[0])} at {plain[slow]:,.1f} "
                      f"tokens/s in {slow} and {plain[fast]:,.1f} in {fast}"))
    apart = sorted((each for each in found if each[0] > 1 + APART), key=lambda each: -each[0])
    return [f"Plain decoding was not equally fast in {len(apart)} of {len(classes)} classes of traffic "
            f"({apart[0][1]}): on other machines, or on one in another state, so compare speed-ups, not "
            "speeds."] if apart else []


def summary(run: Run) -> dict[str, Any]:
    """A line of the table of runs."""
    report, gates = run.report, run.report.get("gates", {})
    training = report.get("training", {})
    return {"name": run.name, "place": str(run.place), "recipe": report.get("recipe"),
            "target": report.get("target") or run.rows[0].get("model"),
            "methods": list(dict.fromkeys(str(row.get("method")) for row in run.rows)),
            "verdict": report.get("verdict"), "rows": len(run.rows), "gates": len(gates),
            "gates_failed": sum(not gate["passed"] for gate in gates.values()),
            "steps": training.get("steps"), "training_seconds": training.get("seconds"),
            "heldout_loss": training.get("final", {}).get("heldout_loss")}


def write(runs: Sequence[Run], out: Path, title: str) -> Path:
    """The page, which is returned, and the files beside it; raises UserError for runs of one name."""
    html.require_extra()
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"several runs are called {', '.join(twice)}; name them apart, as in NAME=FOLDER")
    rows = told_apart(runs)
    shown, found = sweep_view.view(rows), {"runs": [summary(run) for run in runs], "notes": notes(runs, rows)}
    page = out / "comparison.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        page.write_text(html.render_comparison(shown, found, title), encoding="utf-8")
        write_json(out / "comparison.json", {"format": 1, **found, "rows": rows})
        write_files(shown, rows, out / "files")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}); set --out to another "
                        "folder") from error
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]PLACE")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="where all of it goes")
    parser.add_argument("--title", default="Comparison of runs")
    options = parser.parse_args()
    runs = [read_run(word) for word in options.runs]
    page = write(runs, options.out, options.title)
    for note in json.loads((options.out / "comparison.json").read_text())["notes"]:
        print(f"note: {note}")
    print(page, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
