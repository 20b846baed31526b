"""A small training that the tests of this folder share, and one that is stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_class
from safetensors.torch import load_file
from tiny import OFFLINE, acceptance, make_dflash, random_samples

from trainer.hidden_states.offline import Offline, OfflineRuntime
from trainer.records import Sample
from trainer.strategies.single import Single
from trainer.target import Target
from trainer.training.stage import Train, TrainRuntime

CONF = Path(__file__).parents[2] / "conf"
SAMPLES = [Sample(sample.id, sample.tokens, sample.loss_mask) for sample in
           random_samples((40, 25, 33, 18, 52, 29, 44, 21, 36, 30, 27, 48, 20, 31), seed=3)]


def node(group: str, name: str, **changes: Any) -> dict[str, Any]:
    settings = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) | changes
    return {key: value for key, value in settings.items() if key[0] != "_"}


def stage(target: Target, optimizer: str = "adamw", **changes: Any) -> Train:
    """Two epochs and a half; a checkpoint every third step, a line of the log every second."""
    runtime = TrainRuntime("cpu", 1, Single(), checkpoint_every=3, keep_checkpoints=2, log_every=2,
                           wandb_project=None)
    kind = get_class(yaml.safe_load((CONF / f"optimizer/{optimizer}.yaml").read_text())["_target_"])
    known = partial(kind, **node("optimizer", optimizer, lr=3e-3))
    settings = {"target": target, "drafter": make_dflash(anchors=16, layers=1), "source": OFFLINE,
                "optimizer": known, "steps": 13, "tokens": 120,
                "accumulate": 2, "precision": "float32", "compile": False, "heldout_every": 5, "seed": 1,
                "acceptance": acceptance(), "runtime": runtime}
    return Train(**node("train", "default", **{**settings, **changes}))


def run(made: Train, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return made.run(inputs, out)


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def check_equal(one: Path, two: Path) -> None:
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert log_of(one) == log_of(two)
    assert (one / "token_counts.safetensors").read_bytes() == (two / "token_counts.safetensors").read_bytes()


class Stopped(Offline):
    """Stops like a key press when states were asked for a given number of times."""

    left = 0

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        super().__init__(folder, layers, OfflineRuntime("first", 0))

    def get(self, sample: Sample) -> Any:
        Stopped.left -= 1
        if Stopped.left < 0:
            raise KeyboardInterrupt
        return super().get(sample)
