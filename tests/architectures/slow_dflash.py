"""DFlash once more, token by token in float64, straight from its equations: what the fast one is compared
with.

Nothing of trainer/architectures is used but the exported tensors and their config; there is no batch, no mask
and no packing, only the tokens of one document and what may be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slow_decoder import SlowDecoder, slow_sums
from torch import Tensor

from trainer.architectures.base import Exported


class SlowDFlash(SlowDecoder):
    """The drafter behind `exported`, for a target with this embedding and head [V, H]."""

    def __init__(self, exported: Exported, embedding: Tensor, head: Tensor) -> None:
        super().__init__(exported, embedding, head)
        self.mask = exported.flavours["speculators"]["mask_token_id"]

    def logits(self, taps: Tensor, anchor: int, slots: int) -> Tensor:
        """Logits [slots - 1, Vd] of the block after token `anchor`, which follows the tokens of `taps` [n, L
        * H]."""
        return torch.stack([self.head @ each for each in self.states(taps, anchor, slots)[1:]])

    def states(self, taps: Tensor, anchor: int, slots: int) -> list[Tensor]:
        """The normed state of every slot."""
        start = len(taps)
        features = [self.norm(self.weights["fc.weight"] @ row.double(), "hidden_norm") for row in taps]
        stream = [self.embedding[token] for token in [anchor] + [self.mask] * (slots - 1)]
        for layer in range(self.shape["num_hidden_layers"]):
            name = f"layers.{layer}."
            inputs = [self.norm(each, name + "input_layernorm") for each in stream]
            keys = [self.keys(each, place, name) for place, each in enumerate(features)]
            keys += [self.keys(each, start + slot, name) for slot, each in enumerate(inputs)]
            values = [self.heads(each, name, "v_proj") for each in features + inputs]
            for slot, each in enumerate(inputs):
                mixed = self.attend(self.queries(each, start + slot, name), keys, values)
                after = stream[slot] + self.weights[name + "self_attn.o_proj.weight"] @ mixed
                stream[slot] = after + self.mlp(after, name)
        return [self.norm(each, "norm") for each in stream]

    def queries(self, vector: Tensor, position: int, name: str) -> list[Tensor]:
        return [self.turn(self.norm(head, name + "self_attn.q_norm"), position)
                for head in self.heads(vector, name, "q_proj")]

    def keys(self, vector: Tensor, position: int, name: str) -> list[Tensor]:
        return [self.turn(self.norm(head, name + "self_attn.k_norm"), position)
                for head in self.heads(vector, name, "k_proj")]

    def sums(self, tokens: Sequence[int], loss_mask: Sequence[bool], taps: Tensor, slots: int, gamma: float,
             teacher: Tensor | None = None) -> dict[str, float]:
        """See `slow_sums`; `slots` counts the anchor's."""
        return slow_sums(lambda anchor: self.logits(taps[:anchor], tokens[anchor], slots), self.ids, tokens,
                         loss_mask, slots - 1, gamma, teacher)
