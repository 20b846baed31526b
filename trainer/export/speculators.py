"""Format `speculators`: what `vllm serve <folder>` takes alone, since it names its target.

There must be no `model_type` at the top, or a server would read the whole file as that model's config. Each
method's own keys stand at the top, the decoder's inside; layer ids are those of `records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.cpu_build import CpuServer
from trainer.export.base import Serving
from trainer.export.described import FLAGS, NAMES, SELECTOR, Described
from trainer.export.layout import Layout, heads
from trainer.export.serve_line import Place, serve_line


class Speculators(Layout):
    name = "speculators"
    use = "for any current vLLM"

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        return {**super().commands(method, folder, target, lengths, cpu),
                "vllm (short)": serve_line(folder)}

    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        proposal = {"proposal_type": "greedy", "speculative_tokens": serving.default_k}
        verifier = {"name_or_path": serving.target, "architectures": serving.target_architectures}
        return {"speculators_model_type": found.method, **self._own(found),
                "transformer_layer_config": found.geometry, "tie_word_embeddings": False,
                "speculators_config": {"algorithm": found.method, "default_proposal_method": "greedy",
                                       "proposal_methods": [proposal], "verifier": verifier}}

    def keys(self, folder: Path, found: Described) -> dict[str, Any]:
        return self._own(found)

    def _own(self, found: Described) -> dict[str, Any]:
        own, taps = found.options, found.options["tap_layers"]
        rows, wide = own["draft_vocab_size"], own["target_hidden_size"]
        if found.method == "eagle3":
            return {"architectures": [NAMES[found.geometry["model_type"]]], "draft_vocab_size": rows,
                    "eagle_aux_hidden_state_layer_ids": taps, **{name: own[name] for name in FLAGS},
                    **({} if wide == found.geometry["hidden_size"] else {"target_hidden_size": wide})}
        names = [NAMES[found.method]]
        if found.method == "dspark":
            return {"architectures": names, "block_size": own["block_size"],
                    "mask_token_id": own["mask_token_id"], "draft_vocab_size": rows,
                    "target_hidden_size": wide, **heads(own), "aux_hidden_state_layer_ids": taps}
        return {"architectures": names, "block_size": own["block_size"], "draft_vocab_size": rows,
                "target_hidden_size": wide, **{name: own[name] for name in SELECTOR if name in own},
                "aux_hidden_state_layer_ids": taps, "mask_token_id": own["mask_token_id"],
                "sample_from_anchor": False,
                "sliding_window_non_causal": True}  # false would make every layer causal when served
