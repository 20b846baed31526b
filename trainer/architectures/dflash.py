"""DFlash: a block of tokens in one parallel pass, conditioned on the target's hidden states.

The backbone is `block_drafter.py`. Slot k >= 1 predicts the token at p + k by the target's own head; slot 0
carries the anchor and predicts nothing. Served as vLLM's method `dflash`.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from trainer.architectures.base import Exported
from trainer.architectures.block_drafter import BlockContext, BlockDrafter
from trainer.target_head import TargetHead


class DFlash(BlockDrafter):
    method = "dflash"

    @torch.no_grad()
    def draft_logits(self, context: BlockContext, anchor: int, length: int) -> Tensor:
        return self.vocabulary.logits(self.block(context, anchor, length))

    def export(self) -> Exported:
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()}
        rows, taps = self.vocabulary.ids.numel(), list(self.tap_layers)
        shared = {"architectures": ["DFlashDraftModel"], "block_size": self.block_size,
                  "draft_vocab_size": rows, "target_hidden_size": self.head.hidden_size}
        speculators = {"speculators_model_type": "dflash", **shared, "aux_hidden_state_layer_ids": taps,
                       "mask_token_id": self.mask_token_id, "sample_from_anchor": False,
                       "sliding_window_non_causal": True}  # false would make every layer causal when served
        inner = {"mask_token_id": self.mask_token_id, "causal": False, "sample_from_anchor": False,
                 "target_layer_ids": [layer - 1 for layer in taps]}
        native = {**shared, "eagle_aux_hidden_state_layer_ids": taps, "dflash_config": inner}
        return Exported(weights | self.vocabulary.exported(), dict(self.geometry),
                        {"speculators": speculators, "native": native})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config = exported.flavours[flavour]
        inner = config if flavour == "speculators" else config["dflash_config"]
        taps = config["aux_hidden_state_layer_ids"] if flavour == "speculators" else \
            [layer + 1 for layer in inner["target_layer_ids"]]
        return cls.restored(exported, config, inner["mask_token_id"], taps, head,
                            draft_vocab_size=config["draft_vocab_size"])
