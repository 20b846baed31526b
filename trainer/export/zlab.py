"""Format `zlab`: DFlash and DFlash2 as their authors' own code (z-lab/dflash) and SGLang read them.

The draft has neither embedding nor head, so it drafts the target's whole vocabulary. `target_layer_ids` are
0-based layers whose output is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.export.base import Serving
from trainer.export.described import NAMES, SELECTOR, Described
from trainer.export.layout import Layout, target_count
from trainer.export.promised import SHARED


class ZLab(Layout):
    name = "zlab"
    use = "for z-lab's own code, SGLang and vLLM"

    def problem(self, method: str, settings: Mapping[str, Any]) -> str | None:
        if settings.get("draft_vocab_size") is not None:
            return "it has no head of its own, so drafter.draft_vocab_size must be null"
        if 0 in settings["tap_layers"]:
            return "it counts outputs of layers, so drafter.tap_layers must not have 0, the embeddings"
        return None if method[:6] == "dflash" else f"it has DFlash and DFlash2, not {method}"

    def refuses(self, found: Described) -> tuple[str, ...]:
        return SHARED

    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        return zlab_config(found)


def zlab_config(found: Described) -> dict[str, Any]:
    own = found.options
    return {**found.geometry, "architectures": [NAMES[found.method]], "is_causal": False,
            "block_size": own["block_size"], "num_target_layers": target_count(found),
            "draft_vocab_size": own["draft_vocab_size"],
            "dflash_config": {"mask_token_id": own["mask_token_id"],
                              **{name: own[name] for name in SELECTOR if name in own},
                              "target_layer_ids": [layer - 1 for layer in own["tap_layers"]]}}
