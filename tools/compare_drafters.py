"""Several drafters on equal terms: one recipe for each, the same samples, steps and tokens, the same held-out
prompts and draft length; accepted length, and acceptance by position, beside each other.

    python tools/compare_drafters.py [recipe ...] [KEY=VALUE ...] [--out FOLDER]

    python tools/compare_drafters.py 'evaluate.k=[3]'      # all methods on the default target
    python tools/compare_drafters.py dflash_smollm2 eagle3_smollm2 train.steps=200 'evaluate.k=[2]'

Each recipe is run as `python -m trainer recipe=<recipe> KEY=VALUE ...`, one after the other; what is finished
is reused, and a killed comparison goes on. Drafters that did not learn from the same answers, or not for as
many steps, or were not decoded on as many prompts, are not compared: exit status 1, with what differs. What a
recipe is compared for is not among the settings: recipe=, drafter= and run= are refused.

Writes drafters.json, drafters.md (a table) and the page and files of tools/compare_reports.py into --out, or
else the current folder. Exit status 2 when a run fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare_reports import Run, heldout, unequal, write  # noqa: E402

from trainer.progress import exit_status  # noqa: E402

RECIPES = ("dflash_smollm2", "dflash2_smollm2", "dspark_smollm2", "eagle3_smollm2")


def report_of(recipe: str, settings: Sequence[str]) -> dict[str, Any]:
    """What a run of this recipe ends with; its messages are shown as they come."""
    command = [sys.executable, "-m", "trainer", f"recipe={recipe}", *settings]
    print(f"== {' '.join(command[1:])}", flush=True)
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        print(f"recipe={recipe} ended with exit status {process.returncode}; the same command goes on from "
              "there", file=sys.stderr)
        sys.exit(2)
    return json.loads(Path(last).read_text(encoding="utf-8"))


def rows_of(reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each recipe and draft length, the longest accepted length first within a draft length."""
    found = []
    for recipe, report in reports.items():
        train = report["stages"]["train"]["record"]
        served = {row["num_speculative_tokens"]: row for row in heldout(report, "vllm")}
        for row in heldout(report, "in_process"):
            k = row["num_speculative_tokens"]
            there = served.get(k, {})
            found.append({
                "recipe": recipe, "k": k, "parameters": train["parameters"],
                "train_seconds": train["train_seconds"], "accepted_length": row["mean_accepted_length"],
                "per_position": row["per_position_acceptance"],
                "served_accepted_length": there.get("mean_accepted_length"),
                "speedup": there.get("speedup"),
                "lossless": all(each["lossless"] for each in (row, there) if each)})
    return sorted(found, key=lambda row: (row["k"], -row["accepted_length"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, as it goes into a README."""
    titles = ("recipe", "K", "accepted length", "by position", "on vLLM", "speed", "text",
              "parameters", "training")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for row in rows:
        served, speed = row["served_accepted_length"], row["speedup"]
        positions = " ".join(f"{rate:.2f}" for rate in row["per_position"])
        lines.append(f"| `{row['recipe']}` | {row['k']} | {row['accepted_length']:.3f} | {positions} | "
                     f"{'' if served is None else f'{served:.3f}'} | "
                     f"{'' if speed is None else f'{speed:.2f}×'} | "
                     f"{'identical' if row['lossless'] else 'differs'} | {row['parameters'] / 1e6:.1f} M | "
                     f"{row['train_seconds']:.0f} s |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="recipe | KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("."), help="where drafters.json and drafters.md go")
    options = parser.parse_intermixed_args()
    recipes = [word for word in options.words if "=" not in word] or list(RECIPES)
    settings = [word for word in options.words if "=" in word]
    if own := [word for word in settings if word.partition("=")[0] in ("recipe", "drafter", "run")]:
        print(f"{own[0]}: the tool itself decides that; name recipes as they are, without a key",
              file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    reports = {recipe: report_of(recipe, settings) for recipe in recipes}
    rows, problems = rows_of(reports), unequal(reports)
    print()
    if problems:
        print(*(f"not comparable: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    content = json.dumps({"settings": settings, "rows": rows}, indent=1)
    (options.out / "drafters.json").write_text(content + "\n", encoding="utf-8")
    (options.out / "drafters.md").write_text(table(rows), encoding="utf-8")
    print(table(rows), end="")
    print(options.out / "drafters.md")
    print(write([Run(recipe, Path("."), report, report["rows"]) for recipe, report in reports.items()],
                options.out, "Drafters on equal terms"))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
