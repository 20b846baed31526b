"""Checkpoints of a training run: complete, atomic, safetensors only.

`checkpoints/step_000123/` holds `weights.safetensors` (float32 masters), `optimizer.safetensors` and
`state.json` (the position, of which all randomness is a function, the lines of the log, the best step so far,
and the sums of both files). It appears by a rename after its files reached the disk. All tensors are whole,
whatever the layout they were trained in, so that any other goes on from it. """

from __future__ import annotations

import copy
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer import _folders
from trainer.errors import UserError
from trainer.strategies.base import Moments

WEIGHTS, MOMENTS, STATE, DAMAGED = "weights.safetensors", "optimizer.safetensors", "state.json", ".damaged"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk."""

    folder: Path
    step: int


class Writer:
    """Writes checkpoints while training goes on, one after the other. What fails is raised by the next call.
    Takes as much memory of the host as weights and moments do."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    def save(self, root: Path, step: int, drafter: nn.Module, moments: Moments, state: dict[str, Any],
             keep: int) -> None:
        """`save` of what there is now, once the one before is done."""
        self.wait()
        weights = {name: value.to("cpu", copy=True) for name, value in trained(drafter).items()}
        kept = {index: {key: value.to("cpu", copy=True) for key, value in entry.items()}
                for index, entry in moments.items()}
        self._writing = self._pool.submit(_write, root, step, weights, kept, copy.deepcopy(state), keep)

    def wait(self) -> None:
        """Returns when all that was given is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def save(root: Path, step: int, drafter: nn.Module, moments: Moments, state: dict[str, Any],
         keep: int) -> Saved:
    """Writes the checkpoint of `step`, `moments` being the optimizer's state, and removes all but the newest
    `keep`, and those of the best steps that these name."""
    return _write(root, step, trained(drafter), moments, state, keep)


def _write(root: Path, step: int, weights: dict[str, Tensor], moments: Moments, state: dict[str, Any],
           keep: int) -> Saved:
    folder = root / f"step_{step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _folders.require_folder(partial)
    save_file(weights, partial / WEIGHTS)
    save_file(_flat(moments), partial / MOMENTS)
    _folders.settle(partial)
    _folders.write_sealed(partial / STATE, {**state, "step": step, "files": _folders.sums(partial)})
    for replaced in (folder, folder.with_suffix(DAMAGED)):
        shutil.rmtree(replaced, ignore_errors=True)
    partial.rename(folder)
    _folders.sync(root)
    complete = find(root)
    named = {_best_step(saved) for saved in complete[-keep:]}
    for old in complete[:-keep]:
        if old.step not in named:
            shutil.rmtree(old.folder)
    return Saved(folder, step)


def _best_step(saved: Saved) -> int | None:
    with suppress(OSError, ValueError):  # damaged: `newest` tells
        return (_folders.read_sealed(saved.folder / STATE).get("best") or {}).get("step")
    return None


def find(root: Path) -> list[Saved]:
    """Complete checkpoints, oldest first."""
    return sorted((Saved(path, int(path.name[5:])) for path in root.glob("step_*")
                   if path.name[5:].isdigit()), key=lambda saved: saved.step)


def newest(root: Path) -> Saved | None:
    """The newest checkpoint that is as it was saved. Newer ones are told and set aside: training takes their
    steps again, to the same bits."""
    for saved in reversed(find(root)):
        fault = _fault(saved.folder)
        if not fault:
            return saved
        aside = saved.folder.with_suffix(DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        saved.folder.rename(aside)
        print(f"train: {fault}; that checkpoint is set aside as {aside.name}, and an earlier one taken, or "
              f"the beginning", flush=True)
    return None


def load_best(root: Path, step: int, drafter: nn.Module) -> None:
    """Fills the drafter with the weights of `step`, which checkpoints name as the best; raises UserError when
    they are not as they were saved."""
    saved = Saved(root / f"step_{step:06d}", step)
    if fault := _fault(saved.folder):
        raise UserError(f"{fault}, and it holds the best weights of the run; remove {root} and run the same "
                        f"command again, which trains anew")
    load(saved, drafter)


def _fault(folder: Path) -> str:
    """What is wrong with a checkpoint, as the beginning of a sentence; "" when nothing is."""
    try:
        files = _folders.read_sealed(folder / STATE).get("files")
    except (OSError, ValueError) as error:
        return f"{folder / STATE} cannot be read ({error})"
    return _folders.change(folder, files) if files else f"{folder / STATE} names no checksums"


def load(saved: Saved, drafter: nn.Module) -> dict[str, Any]:
    """Fills the drafter, strictly; returns the state."""
    state = _folders.read_sealed(saved.folder / STATE)
    del state["files"]
    load_weights(drafter, load_file(saved.folder / WEIGHTS), saved.folder)
    return state


def load_moments(saved: Saved) -> Moments:
    """The optimizer's state."""
    moments: Moments = {}
    for name, tensor in load_file(saved.folder / MOMENTS).items():
        index, key = name.split(".", 1)
        moments.setdefault(int(index), {})[key] = tensor
    return moments


def trained(drafter: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in drafter.named_parameters()}


def load_weights(drafter: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    """Copies `weights` into the drafter's parameters; names and shapes must match exactly."""
    own = dict(drafter.named_parameters())
    wrong = sorted(set(own) ^ set(weights)) \
        or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise UserError(f"{where} does not fit the drafter: {len(wrong)} tensors differ in name or shape "
                        f"({', '.join(wrong[:3])}); it was made with other drafter settings: remove it and "
                        f"run the same command again")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _flat(moments: Moments) -> dict[str, Tensor]:
    return {f"{index}.{key}": value.contiguous()
            for index, entry in moments.items() for key, value in entry.items()}
