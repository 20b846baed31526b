"""Checkpoints of a training run: complete, atomic, safetensors only.

`checkpoints/step_000123/` holds `weights.safetensors` (float32 masters), `optimizer.safetensors` and
`state.json` (the position; all randomness is a function of it). It appears by a rename after its files
reached the disk. """

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.errors import UserError


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    folder: Path
    step: int


def save(root: Path, step: int, drafter: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any],
         keep: int) -> Saved:
    """Writes the checkpoint of `step` and removes all but the newest `keep`."""
    folder = root / f"step_{step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(trained(drafter), partial / "weights.safetensors")
    save_file(_flat(optimizer), partial / "optimizer.safetensors")
    (partial / "state.json").write_text(json.dumps({**state, "step": step}))
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in find(root)[:-keep]:
        shutil.rmtree(old.folder)
    return Saved(folder, step)


def find(root: Path) -> list[Saved]:
    """Complete checkpoints, oldest first."""
    return sorted((Saved(path, int(path.name[5:])) for path in root.glob("step_*")
                   if path.name[5:].isdigit()), key=lambda saved: saved.step)


def load(saved: Saved, drafter: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Fills drafter and optimizer, strictly; returns the state."""
    try:
        weights = load_file(saved.folder / "weights.safetensors")
        state = json.loads((saved.folder / "state.json").read_text())
        moments = load_file(saved.folder / "optimizer.safetensors") if optimizer is not None else {}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"checkpoint {saved.folder} is damaged ({error}); remove it, training goes on from "
                        "the one before") from error
    load_weights(drafter, weights, saved.folder)
    if optimizer is not None:
        _unflat(optimizer, moments)
    return state


def trained(drafter: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in drafter.named_parameters()}


def load_weights(drafter: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Copies `weights` into the drafter's parameters; names and shapes must match exactly."""
    own = dict(drafter.named_parameters())
    wrong = sorted(set(own) ^ set(weights)) \
        or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise UserError(f"{where} does not fit the drafter: {len(wrong)} tensors differ in name or shape "
                        f"({', '.join(wrong[:3])}); it was made with other drafter settings")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {f"{index}.{key}": value.contiguous() if isinstance(value, Tensor) else torch.tensor(value)
            for index, entry in optimizer.state_dict()["state"].items() for key, value in entry.items()}


def _unflat(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
