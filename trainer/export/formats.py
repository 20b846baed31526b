"""Folder formats of a speculator.

`speculators` is what `vllm serve <folder>` takes alone (it names its target); `native` is the layout of the
method's authors, served beside the target with `--speculative-config`. Neither copies the target's config.
For drafters that live inside their target see `stitched`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainer.architectures.base import Exported
from trainer.cpu_build import CpuServer
from trainer.export.base import Format, Serving
from trainer.export.serve_line import Place, serve_line
from trainer.export.stitched import Changes, Stitched


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

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        return {**super().commands(method, folder, target, lengths, cpu),
                "vllm (short)": serve_line(folder)}


class Native(Format):
    name = "native"
    use = "in the layout of the original authors' checkpoints"

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return {**exported.geometry, **exported.flavours[self.name]}

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config, config


FormatName = Literal["speculators", "native", "stitched", "changes"]
FORMATS: dict[str, Format] = {form.name: form for form in (Speculators(), Native(), Stitched(), Changes())}
