"""What made the difference: the finished trainings below a folder, the settings in which they differ, and
what each of them reached on held-out samples.

    python tools/compare_runs.py [runs] [--bits A B]

With `--bits` two train folders are compared bit for bit: weights, and loss and gradient norm of every step
that was logged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = {"held-out accepted length": "heldout_estimate", "held-out loss": "heldout_loss",
           "training estimate": "estimate"}


def flat(node: Any, prefix: str = "") -> dict[str, str]:
    """Settings by dotted key, without what cannot change a result."""
    if not isinstance(node, dict):
        return {prefix: json.dumps(node)}
    return {key: value for name, child in node.items() if name != "runtime"
            for key, value in flat(child, f"{prefix}.{name}".lstrip(".")).items()}


def finished(root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names and stage records of the finished trainings below `root`, the best one first."""
    found = [(path.parent.name, json.loads(path.read_text())) for path in root.glob("train/*/stage.json")
             if not path.parent.name.endswith(".partial")]
    return sorted(found, key=lambda each: -each[1]["record"]["final"].get("heldout_estimate", 0))


def table(root: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    runs = finished(root)
    if not runs:
        print(f"no finished training below {root}/train", file=sys.stderr)
        return 2
    settings = [flat(run["settings"]) | {f"input.{name}": made[:8] for name, made in run["inputs"].items()}
                for _, run in runs]
    keys = sorted({key for each in settings for key in each
                   if len({other.get(key) for other in settings}) > 1})
    shown = Table("run", *keys, "steps", "seconds", *RESULTS)
    for (name, run), own in zip(runs, settings, strict=True):
        record, final = run["record"], run["record"]["final"]
        shown.add_row(name[:8], *(own.get(key, "-") for key in keys), str(record["steps"]),
                      f"{record['train_seconds']:.0f}",
                      *(f"{final[key]:.3f}" if key in final else "-" for key in RESULTS.values()))
    Console(width=200, markup=False, emoji=False).print(shown)  # settings are the user's own text
    return 0


def bits(one: Path, two: Path) -> int:
    """0 when both runs have the same bits, 1 with the first difference when not."""
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(folder / "weights.safetensors") for folder in (one, two))
    for name in sorted(set(first) | set(second)):
        if name not in first or name not in second or not torch.equal(first[name], second[name]):
            print(f"{name} differs")
            return 1
    logs = [{line["step"]: (line.get("loss"), line["grad_norm"])
             for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())}
            for folder in (one, two)]
    shared = sorted(set(logs[0]) & set(logs[1]))
    for step in shared:
        if logs[0][step] != logs[1][step]:
            print(f"step {step}: loss and gradient norm {logs[0][step]} and {logs[1][step]}")
            return 1
    print(f"equal: {len(first)} tensors, {len(shared)} logged steps")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"))
    parser.add_argument("--bits", nargs=2, type=Path, metavar=("A", "B"))
    options = parser.parse_args()
    return bits(*options.bits) if options.bits else table(options.runs)


if __name__ == "__main__":
    sys.exit(main())
