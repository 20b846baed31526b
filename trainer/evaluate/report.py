"""The last stage: what every stage of a run recorded, as `report.json`, one page, files of its figures, and
console tables.

It computes nothing new. Rows come from the evaluation, gates and key numbers from the stages' records, curves
from the training log. What a run did not write is left out of the report; only the rows are indispensable.
Acceptance by position is cumulative, as vLLM counts it: position i counts when 1 to i were all accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.evaluate import figures, finished_stages, html, slice_figures, sweep_view, traffic
from trainer.evaluate.doubts import (
    NEAR_ONE,
    Doubts,
    left_out,
    of_code,
    of_data,
    of_mix,
    of_slices,
    of_training,
)
from trainer.evaluate.files import write_files
from trainer.page import yes_no
from trainer.pipeline import Stage
from trainer.ranges import NotNegative

TABLE = {"box": box.SIMPLE_HEAD, "title_justify": "left", "title_style": "bold"}
EXPORTED = ("max_k", "default_k", "formats", "confidence")
CURVES = ("loss", "lr", "grad_norm", "estimate", "heldout_loss", "heldout_estimate", "measured",
          "estimate_walk", "gap", "train_walk", "mix")  # fmt: skip


@dataclass(frozen=True)
class Report(Stage):
    """Writes `report.json` and `report.html` into its folder. Where a sweep is finished, both have its rows,
    and where K and users are compared they take the place of those of evaluate.

    `recipe` is the name shown; `serve_with` picks the server whose command `report.json` quotes; the
    tolerances say when a row contradicts itself, which becomes a warning, never a silent repair. `files`:
    every figure goes into the folder `files` as well, and the rows as a table.
    """

    after: ClassVar[tuple[str, ...]] = (
        "prompts",
        "responses",
        "hidden_states",
        "train",
        "export",
        "evaluate",
    )
    uses: ClassVar[tuple[str, ...]] = ("sweep",)
    version: ClassVar[int] = 3

    recipe: str | None
    serve_with: str
    identity_tolerance: NotNegative
    rise_tolerance: NotNegative
    files: bool

    def preflight(self) -> None:
        html.require_extra()

    def run(self, inputs: dict[str, Path], out: Path) -> dict:
        rows = finished_stages.read_rows(inputs)
        log, torn = finished_stages.read_log(inputs.get("train"))
        exported = finished_stages.read_export(inputs.get("export"))
        commands = exported.get("serve_commands", {})
        report = _relative(self.assemble(inputs, rows, log, exported), str(inputs["evaluate"].parent.parent))
        report["serve_command"] = commands.get(self.serve_with)
        if torn:
            report["warnings"].append(
                f"{torn} line(s) of the training log are torn, as a killed run leaves them."
            )
        swept = traffic.read_rows(inputs["sweep"] / "rows.json") if "sweep" in inputs else []
        text = json.dumps({**report, "sweep": swept}, indent=1, ensure_ascii=False)
        (out / "report.json").write_text(text + "\n", encoding="utf-8")
        drawn = {**figures.draw(rows, log), "slice-curves": slice_figures.curves(log)}
        compared = swept or sweep_view.measured(rows)
        view = sweep_view.view(compared) if compared else None
        (out / "report.html").write_text(html.render(report, commands, drawn, view), encoding="utf-8")
        if self.files:
            write_files([drawn, view], rows + swept, out / "files")
        first = headline(rows, exported.get("default_k"))
        passed = sum(gate["passed"] for gate in report["gates"].values())
        return {
            "verdict": report["verdict"],
            "rows": len(rows),
            "accepted_length": first["mean_accepted_length"],
            "speedup": first["speedup"],
            "gates_passed": passed,
            "gates_failed": len(report["gates"]) - passed,
            "warnings": len(report["warnings"]),
        }

    def tell(self, folder: Path) -> None:
        print_tables(finished_stages.read_json(folder / "report.json"))
        print(folder / "report.html", flush=True)

    def assemble(self, inputs: dict[str, Path], rows: list[dict], log: list[dict], exported: dict) -> dict:
        """The content of `report.json`, but for the serve command."""
        names = [name for name in (*self.after, *self.uses) if name in inputs]
        finished = {name: finished_stages.read_json(inputs[name] / "stage.json") for name in names}
        gates = merge_gates(finished)
        sound = bool(gates) and all(gate["passed"] for gate in gates.values())
        prompts = finished.get("prompts", {}).get("record", {}).get("train")
        doubts = Doubts(self.identity_tolerance, self.rise_tolerance, sound, prompts)
        return {
            "format": 1,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "recipe": self.recipe or "unnamed recipe",
            "target": exported.get("target") or rows[0]["model"],
            "method": exported.get("method") or rows[0]["method"],
            "verdict": verdict(rows, exported.get("default_k")),
            "mix": own_mix(finished),
            "rows": rows,
            "gates": gates,
            "warnings": [*of_code(finished), *doubts.warnings(rows), *of_slices(rows), *of_training(finished),
                         *of_mix(finished), *of_data(finished), *left_out(finished)],
            "training": summarise_training(log, finished.get("train")),
            "export": {key: exported[key] for key in EXPORTED if key in exported},
            "stages": {name: _stage(name, inputs[name], finished[name]) for name in names},
            "versions": merge_versions(finished),
        }


def headline(rows: list[dict], default_k: int | None) -> dict:
    """The row a reader asks for first: real server, all prompts, the default K, fewest users; or the next."""

    def distance(row: dict) -> tuple:
        other_k = row["num_speculative_tokens"] != default_k
        return (row.get("engine") != "vllm", "/" in row["dataset"], other_k, row.get("users") or 1,
                -(row["speedup"] or row["mean_accepted_length"]))  # fmt: skip

    return min(rows, key=distance)


def verdict(rows: list[dict], default_k: int | None) -> str:
    """'accepted length 1.52 at K=3, 1.21x plain decoding at 1 user, text identical', as far as measured."""
    row = headline(rows, default_k)
    parts = [f"accepted length {row['mean_accepted_length']:.2f} at K={row['num_speculative_tokens']}"]
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.2f}x plain decoding at {figures.users(row)}")
    elif row["mean_accepted_length"] < NEAR_ONE:
        parts.append("no speedup, as next to no draft is accepted")
    elif row.get("interpreted"):
        parts.append("no speed to tell, as vLLM's CPU build interprets the kernels of this method")
    elif row["tok_s"] is not None:
        parts.append("too few tokens timed to tell a speedup")
    if row.get("lossless") is not None:
        parts.append("text identical" if row["lossless"] else "text differs")
    return ", ".join(parts)


def own_mix(finished: dict[str, dict]) -> dict | None:
    """The weights of the user's own traffic and what is accepted of it; None where none were given."""
    found = finished.get("evaluate", {})
    length = found.get("record", {}).get("mix")
    return None if length is None else {"accepted_length": length, "weights": found["settings"]["weights"]}


def merge_gates(finished: dict[str, dict]) -> dict[str, dict]:
    """The gates of all stages under 'stage/gate', in the order of the stages."""
    return {
        f"{stage}/{name}": gate
        for stage, content in finished.items()
        for name, gate in content["record"].get("gates", {}).items()
    }


def merge_versions(finished: dict[str, dict]) -> dict[str, str]:
    """Every package once; where stages ran under different versions, all of them in order of appearance."""
    seen: dict[str, list[str]] = {}
    for content in finished.values():
        for package, version in content.get("versions", {}).items():
            if str(version) not in seen.setdefault(package, []):
                seen[package].append(str(version))
    return {package: ", ".join(versions) for package, versions in seen.items()}


def summarise_training(log: list[dict], finished: dict | None) -> dict:
    """Last known value of every curve, the steps and tokens done and their seconds; {} without training."""
    if finished is None:
        return {}
    summary = {"seconds": finished["record"].get("seconds", finished["seconds"])}
    known = ("before_training", "best_step", "accepted_length", "mix_before", "mix")
    summary |= {key: finished["record"][key] for key in known if key in finished["record"]}
    if log:
        summary["steps"] = log[-1]["step"]
        summary["final"] = {
            key: values[-1] for key in CURVES if (values := [e[key] for e in log if key in e])
        }
        slices = {kind: {name: next(e[key] for e in reversed(log) if key in e) for name, key in names.items()}
                  for kind, names in slice_figures.by_kind({k: 0.0 for e in log for k in e}).items()}
        summary |= {"slices": slices} if slices else {}
    tokens = finished["record"].get("tokens", log[-1].get("tokens") if log else None)
    return summary if tokens is None else summary | {"tokens": tokens}


def print_tables(report: dict) -> None:
    """The rows and the gates, compactly, for whoever watched the run; a log file gets wide lines. Names are
    the user's own, so nothing in them is markup."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(title=f"{report['recipe']}: {report['verdict']}", **TABLE)
    for title in ("data", "engine", "by position"):
        table.add_column(title)
    for title in ("K", "users", "accepted length", "plain tok/s", "tok/s", "speedup", "identical"):
        table.add_column(title, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["dataset"],
            figures.engine_of(row),
            " ".join(f"{rate:.2f}" for rate in row["per_position_acceptance"]),
            html.draft_length(row),
            str(row.get("users") or ""),
            html.number(row["mean_accepted_length"], 2),
            html.number(row["baseline_tok_s"], 1),
            html.number(row["tok_s"], 1),
            html.number(row["speedup"], 2),
            yes_no(row.get("lossless")),
        )
    console.print(table)
    if report["mix"]:
        console.print(f"accepted length {report['mix']['accepted_length']:.3f} of your own mix of traffic "
                      f"({html.shares(report['mix']['weights'])})")
    if report["gates"]:
        gates = Table("gate", "value", "bound", "result", title="gates", **TABLE)
        for name, gate in report["gates"].items():
            result = Text("passed", "green") if gate["passed"] else Text.assemble(
                ("failed", "red"), f": {gate['cause']}"
            )
            bound = f"{gate['comparison']} {html.compact(gate['bound'])}"
            gates.add_row(name, html.compact(gate["value"]), bound, result)
        console.print(gates)
    for warning in report["warnings"]:
        console.print(Text.assemble(("warning", "yellow"), f" {warning}"), soft_wrap=True)


def _stage(name: str, folder: Path, content: dict) -> dict:
    record = {key: value for key, value in content["record"].items() if key != "gates"}
    head = {"seconds": content["seconds"], "fingerprint": content["fingerprint"]}
    head["resumed"] = content.get("resumed", False)  # then the seconds are those of the last call alone
    return head | {"folder": f"{name}/{folder.name}", "record": record}


def _relative(value: object, root: str) -> object:
    """The same value with every path inside the run root made relative to it, so that a report can travel."""
    if isinstance(value, dict):
        return {key: _relative(item, root) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(item, root) for item in value]
    return value.replace(f"{root}/", "") if isinstance(value, str) else value
