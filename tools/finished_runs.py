"""A part of tools/compare_runs.py and no command: the finished trainings below a folder, their settings, and
what they reached."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = {"held-out accepted length": "heldout_estimate", "held-out loss": "heldout_loss",
           "training estimate": "estimate"}
ENGINES = {"in_process": "in process", "vllm": "vLLM"}
STORED = ("storage", "dtype", "last_rows", "tap_layers")  # where a manifest knows better than the settings


@dataclass(frozen=True)
class Run:
    """One finished training. `settings` by dotted key, without what cannot change a result; `figures` by the
    names that people read; `target` as its hidden states name it, "" where they are not there any more."""

    name: str
    target: str
    settings: dict[str, str]
    record: dict[str, Any]
    figures: dict[str, float]


def flat(node: Any, prefix: str = "") -> dict[str, str]:
    """Settings by dotted key, without what cannot change a result."""
    if not isinstance(node, dict):
        return {prefix: json.dumps(node)}
    return {key: value for name, child in node.items() if name != "runtime" or "_target_" not in node
            for key, value in flat(child, f"{prefix}.{name}".lstrip(".")).items()}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def upstream(root: Path, inputs: dict[str, str]) -> dict[str, str]:
    """The settings of the stages that a training stands on, by the stage's name and their key; of a stage
    that is not there any more, the beginning of its fingerprint."""
    found: dict[str, str] = {}
    for name, made in inputs.items():
        folder = root / name / made[:16]
        if not (folder / "stage.json").is_file():
            found[f"input.{name}"] = made[:8]
            continue
        stage = read(folder / "stage.json")
        found |= upstream(root, stage["inputs"]) | flat(stage["settings"], name)
        if (folder / "manifest.json").is_file():
            manifest = read(folder / "manifest.json")
            found |= {f"{name}.{key}": json.dumps(manifest[key]) for key in STORED if key in manifest}
    return found


def target_of(root: Path, inputs: dict[str, str]) -> str:
    """What stands for the target in the manifest of the hidden states that were trained on."""
    manifest = root / "hidden_states" / inputs.get("hidden_states", "")[:16] / "manifest.json"
    return str(read(manifest).get("target", "")) if manifest.is_file() else ""


def decoded(root: Path) -> dict[str, dict[str, float]]:
    """Accepted lengths of the finished evaluations, by the folder's name of the training."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(finished(root, "evaluate"), key=lambda each: each.stat().st_mtime):
        exported = root / "export" / read(path)["inputs"]["export"][:16] / "stage.json"
        if not exported.is_file():
            continue
        figures = found.setdefault(read(exported)["inputs"]["train"][:16], {})
        for row in read(path.with_name("rows.json")):
            if row["dataset"] == "heldout":
                name = (f"accepted length, K={row['num_speculative_tokens']}, {row['prompts']} prompts "
                        f"{ENGINES.get(row['engine'], row['engine'])}")
                figures[name] = row["mean_accepted_length"]
    return found


def finished(root: Path, stage: str) -> list[Path]:
    return [path for path in root.glob(f"{stage}/*/stage.json") if path.parent.suffix != ".partial"]


def runs_below(roots: Iterable[Path]) -> list[Run]:
    """The finished trainings, the best one first."""
    found = []
    for root in roots:
        accepted = decoded(root)
        for path in finished(root, "train"):
            stage, name = read(path), path.parent.name
            final = stage["record"]["final"]
            figures = {shown: final[key] for shown, key in RESULTS.items() if key in final}
            found.append(Run(name, target_of(root, stage["inputs"]),
                             upstream(root, stage["inputs"]) | flat(stage["settings"]),
                             stage["record"], figures | accepted.get(name, {})))
    return sorted(found, key=lambda run: -run.figures.get("held-out accepted length", 0.0))
