"""EAGLE-3 once more, one pair at a time in float64, straight from its equations: what the fast one is
compared with.

Nothing of trainer/architectures is used but the exported tensors and their config. Every committed pair goes
through the layers alone and leaves its keys; a draft then goes on from a copy of them, one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slow_decoder import SlowDecoder
from torch import Tensor

from trainer.architectures.base import Exported

Cache = list[tuple[list[list[Tensor]], list[list[Tensor]]]]  # keys and values by layer, pair and head


class SlowEagle3(SlowDecoder):
    """The drafter behind `exported`, for a target with this embedding and head [V, H]."""

    def __init__(self, exported: Exported, embedding: Tensor, head: Tensor) -> None:
        super().__init__(exported, embedding, head)
        self.flags = exported.flavours["native"]
        self.taps = len(self.flags["eagle_aux_hidden_state_layer_ids"])
        self.head_norms = self.shape["model_type"] == "qwen3"

    def draft(self, tokens: Sequence[int], taps: Tensor, anchor: int, slots: int,
              forced: Sequence[int] | None = None) -> Tensor:
        """Logits [slots, Vd] after tokens[anchor]; the chain reads `forced` tokens, else its own."""
        cache: Cache = [([], []) for _ in range(self.shape["num_hidden_layers"])]
        for index in range(anchor - 1):
            self.step(tokens[index + 1], self.feature(taps[index]), index, cache)
        state, token, found = self.feature(taps[anchor - 1]), tokens[anchor], []
        for slot in range(slots):
            stream = self.step(token, state, anchor - 1 + slot, cache)
            normed = self.norm(stream, "norm")
            state = normed if self.flags["norm_output"] else stream
            found.append(self.head @ normed)
            token = self.ids[int(found[-1].argmax())] if forced is None else \
                forced[slot] if slot < len(forced) else 0
        return torch.stack(found)

    def feature(self, taps: Tensor) -> Tensor:
        taps = taps.double()
        if self.flags["norm_before_fc"]:
            taps = self.norm(taps, "input_norm")
        if self.flags["fc_norm"]:
            taps = torch.cat([self.norm(part, f"fc_norm.{index}")
                              for index, part in enumerate(taps.split(len(taps) // self.taps))])
        return self.weights["fc.weight"] @ taps

    def step(self, token: int, feature: Tensor, position: int, cache: Cache) -> Tensor:
        """The stream behind the last layer of one pair, whose keys and values join the cache."""
        stream = feature
        for layer, (keys, values) in enumerate(cache):
            name = f"layers.{layer}."
            if layer == 0:
                normed = self.norm(stream, name + "hidden_norm")
                read = torch.cat([self.norm(self.embedding[token], name + "input_layernorm"), normed])
                residual = normed if self.flags["norm_before_residual"] else stream
            else:
                read, residual = self.norm(stream, name + "input_layernorm"), stream
            keys.append([self.turn(self.head_norm(each, name, "k"), position)
                         for each in self.heads(read, name, "k_proj")])
            values.append(self.heads(read, name, "v_proj"))
            queries = [self.turn(self.head_norm(each, name, "q"), position)
                       for each in self.heads(read, name, "q_proj")]
            mixed = self.attend(queries, keys, values)
            after = residual + self.weights[name + "self_attn.o_proj.weight"] @ mixed
            stream = after + self.mlp(after, name)
        return stream

    def head_norm(self, vector: Tensor, name: str, part: str) -> Tensor:
        return self.norm(vector, f"{name}self_attn.{part}_norm") if self.head_norms else vector
