"""Format `deepspec`: DSpark and EAGLE-3 as DeepSpec's own code reads them, with embedding and head inside.

vLLM and SGLang serve its DSpark; its EAGLE-3 (`Qwen3Eagle3Model`) no server knows by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.cpu_build import CpuServer
from trainer.export.base import Serving
from trainer.export.described import FLAGS, NAMES, Described
from trainer.export.layout import Layout, heads, target_count
from trainer.export.promised import SHARED
from trainer.export.serve_line import Place

ANCHORS, DECAY = 512, 0.8  # DeepSpec's own settings of training, which its classes ask for


class DeepSpec(Layout):
    name = "deepspec"
    use = "for DeepSpec's own code (its DSpark for vLLM, too)"

    def problem(self, method: str, settings: Mapping[str, Any]) -> str | None:
        if method == "dspark":
            if not settings["sample_from_anchor"]:
                return "its slot 0 predicts, too, so drafter.sample_from_anchor must be true"
        elif method != "eagle3":
            return f"it has DSpark and EAGLE-3, not {method}"
        elif settings["style"] != "qwen3" or settings["layers"] != 1:
            return "its EAGLE-3 is one layer with norms of heads: drafter.style=qwen3, drafter.layers=1"
        elif on := [name for name in FLAGS if settings[name]]:
            return f"its EAGLE-3 has no {on[0]}, so drafter.{on[0]} must be false"
        return None if settings.get("draft_vocab_size") is None else \
            "its head is the target's whole one, so drafter.draft_vocab_size must be null"

    def needs(self, found: Described) -> tuple[str, ...]:
        return SHARED

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        if method != "eagle3":
            return super().commands(method, folder, target, lengths, cpu)
        renew = f"python tools/convert.py {folder} NEW_FOLDER --format native"
        return {"convert": renew} | super().commands(method, "NEW_FOLDER", target, lengths, cpu)

    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        own = found.options
        if found.method == "dspark":
            return dspark_config(found)
        return {**found.geometry, "architectures": ["Qwen3Eagle3Model"],
                "num_target_layers": target_count(found), "draft_vocab_size": own["draft_vocab_size"],
                "target_layer_ids": [layer - 1 for layer in own["tap_layers"]],
                **{name: own[name] for name in FLAGS}, "ttt_length": serving.default_k,
                "step_loss_decay": DECAY, "draft_num_hidden_layers": found.geometry["num_hidden_layers"],
                "target_model_name_or_path": serving.target}


def dspark_config(found: Described) -> dict[str, Any]:
    own = found.options
    return {**found.geometry, "architectures": [NAMES["dspark"]], "num_target_layers": target_count(found),
            "block_size": own["block_size"], "mask_token_id": own["mask_token_id"],
            "draft_vocab_size": own["draft_vocab_size"],
            "target_layer_ids": [layer - 1 for layer in own["tap_layers"]], "num_anchors": ANCHORS,
            **heads(own)}
