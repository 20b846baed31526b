"""`tools/compare_runs.py` on training folders as the train stage writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TOOL = Path(__file__).parents[2] / "tools/compare_runs.py"


def training(root: Path, name: str, lr: float, estimate: float, weight: float) -> Path:
    folder = root / "train" / name
    folder.mkdir(parents=True)
    final = {"step": 9, "estimate": 1.0, "heldout_estimate": estimate, "heldout_loss": 5.0}
    (folder / "stage.json").write_text(json.dumps({
        "settings": {"optimizer": {"lr": lr}, "epochs": 1, "runtime": {"log_every": name}},
        "inputs": {"responses": "0" * 16},
        "record": {"steps": 9, "train_seconds": 1.0, "final": final}}))
    (folder / "log.jsonl").write_text(json.dumps({"step": 9, "loss": weight, "grad_norm": 1.0}) + "\n")
    save_file({"w": torch.full((2,), weight)}, folder / "weights.safetensors")
    return folder


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_shows_what_differs_and_the_best_first(tmp_path: Path) -> None:
    training(tmp_path, "aaaa", 0.1, 1.2, 1.0)
    training(tmp_path, "bbbb", 0.2, 1.3, 2.0)
    done = call(tmp_path)
    assert done.returncode == 0
    assert "optimizer.lr" in done.stdout and "epochs" not in done.stdout and "log_every" not in done.stdout
    assert done.stdout.index("bbbb") < done.stdout.index("aaaa")
    assert call(tmp_path / "nothing").returncode == 2


def test_bits_tells_equal_from_different(tmp_path: Path) -> None:
    one, two, other = (training(tmp_path, name, 0.1, 1.2, weight)
                       for name, weight in (("aaaa", 1.0), ("bbbb", 1.0), ("cccc", 1.5)))
    assert call("--bits", one, two).returncode == 0
    done = call("--bits", one, other)
    assert done.returncode == 1 and "w differs" in done.stdout
