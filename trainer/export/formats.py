"""Folder formats of a speculator: one `config.json` and one `model.safetensors`, written field by field and
read back.

`speculators` is what `vllm serve <folder>` takes alone (it names its target); `native` is the layout of the
method's authors, served beside the target with `--speculative-config`. Neither copies the target's config.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.architectures.base import Exported
from trainer.errors import UserError


@dataclass(frozen=True)
class Serving:
    """What a folder says about its use: the target to serve it with and the default draft length."""

    target: str
    target_architectures: list[str]
    default_k: int


class Format(ABC):
    name: str
    use: str  # whom it is for, as the end of a run says it

    @abstractmethod
    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]: ...

    @abstractmethod
    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Geometry and method keys of a config of this format."""

    def write(self, folder: Path, exported: Exported, serving: Serving, dtype: torch.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config(exported, serving)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
                   for name, tensor in exported.weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def read(self, folder: Path) -> Exported:
        """The content of a folder inside a finished stage `export` as it lies on disk, tensors in float32."""
        try:
            geometry, keys = self.parse(json.loads((folder / "config.json").read_text()))
            weights = load_file(folder / "model.safetensors")
        except (OSError, json.JSONDecodeError, KeyError, SafetensorError) as error:
            raise UserError(f"{folder} is not a readable {self.name} speculator ({type(error).__name__}: "
                            f"{error}); remove {folder.parent} and run the same command again") from error
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor
                   for name, tensor in weights.items()}
        return Exported(weights, geometry, {self.name: keys})


class Speculators(Format):
    name = "speculators"
    use = "for any current vLLM"

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        own = exported.flavours[self.name]
        proposal = {"proposal_type": "greedy", "speculative_tokens": serving.default_k}
        verifier = {"name_or_path": serving.target, "architectures": serving.target_architectures}
        return {**own, "transformer_layer_config": exported.geometry, "tie_word_embeddings": False,
                "speculators_config": {"algorithm": own["speculators_model_type"],
                                       "default_proposal_method": "greedy",
                                       "proposal_methods": [proposal], "verifier": verifier}}

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config["transformer_layer_config"], config


class Native(Format):
    name = "native"
    use = "in the layout of the original authors' checkpoints"

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return {**exported.geometry, **exported.flavours[self.name]}

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config, config


FormatName = Literal["speculators", "native"]
FORMATS: dict[str, Format] = {form.name: form for form in (Speculators(), Native())}

