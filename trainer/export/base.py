"""The promise of a folder format: written field by field, read back, and served."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.architectures.base import Exported
from trainer.cpu_build import CpuServer
from trainer.errors import UserError
from trainer.export.serve_line import FUSED, Place, serve_line, speculation

FUSED_VLLM = "vllm (fused verification)"
CPU_VLLM = "vllm (CPU build)"


@dataclass(frozen=True)
class Serving:
    """What a folder says about its use: the target to serve it with and the default draft length; `folder` is
    where the target lies on this machine, for formats that take files of it, and `layers` how many it has."""

    target: str
    target_architectures: list[str]
    default_k: int
    folder: Path | None = None
    layers: int | None = None


class Format(ABC):
    name: str
    use: str  # whom it is for, as the end of a run says it
    loaded: bool = True  # by a server, as it is
    title: str = "Speculator for {target}"  # these two are the card's
    about: str = ("A drafter for speculative decoding: the target checks every token that it drafts, so the "
                  "text stays the target's own, and takes fewer of the target's steps.")

    @abstractmethod
    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]: ...

    @abstractmethod
    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Geometry and method keys of a config of this format."""

    def problem(self, method: str, settings: Mapping[str, Any]) -> str | None:
        """Why no folder of this format can hold a drafter with these settings (those of its YAML)."""
        return None

    def served(self, folder: Place, target: Place) -> tuple[Place, Place | None]:
        """What a server loads as its model, and as its drafter (None: the model has it inside)."""
        return target, folder

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        """Commands by platform that serve the folder, without and with fused verification, and for a build
        for CPUs where one serves it; `lengths` as `draft_lengths` gives them."""
        model, drafter = self.served(folder, target)
        draft = speculation(method, drafter, lengths)
        found = {"vllm": serve_line(model, draft), FUSED_VLLM: serve_line(model, draft, variables=FUSED)}
        if cpu is not None:
            found[CPU_VLLM] = serve_line(model, draft, cpu.flags, cpu.variables, cpu.program)
        return found

    def write(self, folder: Path, exported: Exported, serving: Serving, dtype: torch.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config(exported, serving)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(in_dtype(exported, dtype), folder / "model.safetensors", metadata={"format": "pt"})

    def seal(self, folder: Path, serving: Serving) -> None:
        """Adds to a folder that is to last what takes too long for one that is measured while training."""
        return  # most have nothing of the kind

    def read(self, folder: Path) -> Exported:
        """The content of a folder inside a finished stage `export` as it lies on disk, tensors in float32."""
        try:
            geometry, keys = self.parse(json.loads((folder / "config.json").read_text()))
            weights = self.weights(folder)
        except (OSError, json.JSONDecodeError, KeyError, SafetensorError) as error:
            raise UserError(f"{folder} is not a readable {self.name} speculator ({type(error).__name__}: "
                            f"{error}); remove {folder.parent} and run the same command again") from error
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor
                   for name, tensor in weights.items()}
        return Exported(weights, geometry, {self.name: keys})

    def weights(self, folder: Path) -> dict[str, Tensor]:
        return load_file(folder / "model.safetensors")


def told(commands: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    """What the end of a run, or of a tool, says of how the drafter with these facts is served."""
    lines = [f"put it into the target: {commands['apply']}"] if "apply" in commands else []
    lines.append(f"serve it: {commands['vllm']}")
    if CPU_VLLM in commands:
        lines.append(f"serve it with the CPU build of vLLM that is here: {commands[CPU_VLLM]}")
    lines.append(f"with fused verification (see the README): {commands[FUSED_VLLM]}")
    if not facts.get("speculate", True):
        lines.append("serve it without a drafter, though: where it was measured, plain decoding was faster")
    return lines


def in_dtype(exported: Exported, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights as they are written."""
    return {name: tensor.to(dtype if tensor.is_floating_point() and name not in exported.exact
                            else tensor.dtype).contiguous() for name, tensor in exported.weights.items()}
