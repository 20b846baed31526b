"""MTP in the layout of MiMo once more, one pair at a time in float64, straight from its equations: what the
fast one is compared with.

Nothing of trainer/architectures is used but the exported tensors and the config that a server reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slow_decoder import SlowDecoder
from torch import Tensor

from trainer.architectures.base import Exported

PREFIX = "model.mtp_layers.0."
Cache = tuple[list[list[Tensor]], list[list[Tensor]]]  # keys and values by pair and head


class SlowMtp(SlowDecoder):
    """The module behind `exported`, for a target with this embedding and head [V, H]."""

    def __init__(self, exported: Exported, embedding: Tensor, head: Tensor) -> None:
        super().__init__(exported, embedding, head)
        self.weights = {name.removeprefix(PREFIX): tensor for name, tensor in self.weights.items()
                        if name.startswith(PREFIX)}

    def draft(self, tokens: Sequence[int], states: Tensor, anchor: int, slots: int,
              forced: Sequence[int] | None = None) -> Tensor:
        """Logits [slots, V] after tokens[anchor]; the chain reads `forced` tokens, else its own."""
        cache: Cache = [], []
        for index in range(anchor - 1):
            self.step(tokens[index + 1], states[index].double(), index, cache)
        state, token, found = states[anchor - 1].double(), tokens[anchor], []
        for slot in range(slots):
            state = self.step(token, state, anchor - 1 + slot, cache)
            found.append(self.head @ state)
            token = int(found[-1].argmax()) if forced is None else forced[slot] if slot < len(forced) else 0
        return torch.stack(found)

    def step(self, token: int, state: Tensor, position: int, cache: Cache) -> Tensor:
        """The normed output of one pair, whose keys and values join the cache; the token of position 0
        counts as zero."""
        embedded = self.embedding[token] * (position > 0)
        both = torch.cat([self.norm(state, "hidden_layernorm"), self.norm(embedded, "token_layernorm")])
        stream = self.weights["input_proj.weight"] @ both
        read = self.norm(stream, "input_layernorm")
        keys, values = cache
        keys.append([self.turn(each, position) for each in self.heads(read, "", "k_proj")])
        values.append(self.heads(read, "", "v_proj"))
        queries = [self.turn(each, position) for each in self.heads(read, "", "q_proj")]
        after = stream + self.weights["self_attn.o_proj.weight"] @ self.attend(queries, keys, values)
        return self.norm(after + self.mlp(after, ""), "final_layernorm")

    def heads(self, vector: Tensor, name: str, part: str) -> list[Tensor]:
        bias = self.weights[f"{name}self_attn.{part}.bias"]
        size = self.shape["hidden_size"] // self.shape["num_attention_heads"]
        return list((self.weights[f"{name}self_attn.{part}.weight"] @ vector + bias).split(size))
