"""`report.json`, and the rows of a sweep, as one page that loads nothing: styles, figures and a few lines of
script are inside it.

The templates lie beside this file, their frame beside `page`. Every value is escaped by the template engine;
only the figures, which are ours, are not.
"""

from __future__ import annotations

import json
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.page import compact, duration, environment, moment, number

if TYPE_CHECKING:
    from jinja2 import Environment

EXTRA = ("matplotlib", "jinja2")
KEY_NUMBERS = 8  # of a stage's record shown in the table; the whole record is folded beneath it


def require_extra() -> None:
    """Raises UserError unless what draws and fills the pages is installed."""
    for package in EXTRA:
        if find_spec(package) is None:
            raise UserError(
                f"The report needs {package}, which is not installed; install the extra with "
                "pip install 'speculator-trainer[report]', or leave report out of run=."
            )


def render(report: dict, serve_commands: dict[str, str], drawings: dict[str, str | None],
           sweep: dict[str, Any] | None = None) -> str:
    """The page of a report. `drawings` are inline `<svg>` elements by name, None where nothing was drawn;
    `sweep` is what sweep_view made of a sweep."""
    failed = [name for name, gate in report["gates"].items() if not gate["passed"]]
    return _environment().get_template("report.html.jinja").render(
        report=report,
        created=moment(datetime.fromisoformat(report["created"])),
        drawings={name: svg for name, svg in drawings.items() if svg},
        serve_commands=serve_commands,
        failed=failed,
        facts=_facts(report),
        vocabulary=report["stages"].get("train", {}).get("record", {}).get("draft_vocabulary"),
        engines={"in_process": "in process", "vllm": "vLLM"},
        stages={name: stage | _split(stage["record"]) for name, stage in report["stages"].items()},
        total_seconds=sum(stage["seconds"] for stage in report["stages"].values()),
        sweep=sweep,
    )


def render_sweep(sweep: dict[str, Any], title: str) -> str:
    """The page of a sweep alone."""
    return _environment().get_template("sweep_page.html.jinja").render(
        sweep=sweep, title=title, created=moment(datetime.now())
    )


def render_comparison(sweep: dict[str, Any], found: dict[str, Any], title: str) -> str:
    """The page of several runs beside each other: `found` has their lines and notes, `sweep` what sweep_view
    made of all their rows."""
    return _environment().get_template("comparison.html.jinja").render(
        sweep=sweep, found=found, title=title, created=moment(datetime.now())
    )


def _environment() -> Environment:
    found = environment(Path(__file__).parent)
    found.filters |= {each.__name__: each for each in (draft_length, shares)}
    return found


def draft_length(row: dict) -> str:
    """'3'; '1.62 of 3' where drafts are cut, for what a step verified of those drafted."""
    drafted, verified = row["num_speculative_tokens"], row.get("verified_tokens")
    return str(drafted) if verified is None else f"{verified:.2f} of {drafted}"


def shares(weights: dict[str, dict[str, float]]) -> str:
    """'category: code 75 %, chat 25 %', of the weights of a mix."""
    return "; ".join(f"{kind}: " + ", ".join(f"{name} {100 * each / sum(names.values()):.0f} %"
                                             for name, each in names.items())
                     for kind, names in weights.items())


def _facts(report: dict) -> list[tuple[str, str]]:
    """The small cards under the header: label and value, only of what the run recorded."""
    training = report["training"]
    final, confidence = training.get("final", {}), report["export"].get("confidence", {})
    vocabulary = report["stages"].get("train", {}).get("record", {}).get("draft_vocabulary")
    facts = [
        ("training time", duration(training["seconds"]) if "seconds" in training else None),
        ("steps", compact(training["steps"]) if "steps" in training else None),
        ("accepted length before training", number(training.get("before_training"), 3)),
        ("at the best step", number(training.get("accepted_length"), 3)),
        ("of your mix, at the best step", number(training.get("mix"), 3)),
        ("of your mix, as exported", number(report["mix"]["accepted_length"], 3) if report["mix"] else None),
        ("best step", compact(training["best_step"]) if "best_step" in training else None),
        ("tokens", compact(training["tokens"]) if "tokens" in training else None),
        ("final loss", number(final["loss"], 3) if "loss" in final else None),
        ("held-out loss", number(final["heldout_loss"], 3) if "heldout_loss" in final else None),
        ("default K", compact(report["export"].get("default_k", None))),
        ("largest K", compact(report["export"].get("max_k", None))),
        ("draft vocabulary covers", f"{vocabulary['covered']:.2%}" if vocabulary else None),
        ("confidence error", number(confidence.get("error_before"), 3)),
        ("the same, calibrated", number(confidence.get("error_after"), 3)),
    ]
    return [(label, value) for label, value in facts if value not in (None, "None", "")]


def _split(record: dict) -> dict:
    """A record's plain numbers and short words for the table, and the whole of it as text for the fold."""
    short = {
        key.replace("_", " "): compact(value)
        for key, value in record.items()
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 40)
    }
    return {
        "numbers": dict(list(short.items())[:KEY_NUMBERS]),
        "whole": json.dumps(record, indent=1, ensure_ascii=False),
    }
