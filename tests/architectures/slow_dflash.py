"""DFlash once more, token by token in float64, straight from its equations: what the fast one is compared
with.

Nothing of trainer/architectures is used but the exported tensors and their config; there is no batch, no mask
and no packing, only the tokens of one document and what may be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, exp, sin, sqrt
from typing import Any

import torch
from torch import Tensor

from trainer.architectures.base import Exported


class SlowDFlash:
    """The drafter behind `exported`, for a target with this embedding and head [V, H]."""

    def __init__(self, exported: Exported, embedding: Tensor, head: Tensor) -> None:
        self.weights = {name: tensor.double() for name, tensor in exported.weights.items()}
        self.shape: dict[str, Any] = exported.geometry
        keys = exported.flavours["speculators"]
        self.mask = keys["mask_token_id"]
        self.embedding = embedding.double()
        self.head = self.weights.get("lm_head.weight", head.double())
        offsets = exported.weights.get("d2t", torch.zeros(len(self.head), dtype=torch.int64))
        self.ids = [row + int(offset) for row, offset in enumerate(offsets)]  # target id of each draft row

    def logits(self, taps: Tensor, anchor: int, slots: int) -> Tensor:
        """Logits [slots - 1, Vd] of the block after token `anchor`, which follows the tokens of `taps` [n, L
        * H]."""
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
                normed = self.norm(after, name + "post_attention_layernorm")
                gate = self.weights[name + "mlp.gate_proj.weight"] @ normed
                up = self.weights[name + "mlp.up_proj.weight"] @ normed
                inner = gate * gate.sigmoid() * up
                stream[slot] = after + self.weights[name + "mlp.down_proj.weight"] @ inner
        return torch.stack([self.head @ self.norm(each, "norm") for each in stream[1:]])

    def attend(self, queries: list[Tensor], keys: list[list[Tensor]], values: list[list[Tensor]]) -> Tensor:
        """One slot: every query head over all keys, which are context before the anchor and the own block."""
        share = len(queries) // len(keys[0])
        out = []
        for head, query in enumerate(queries):
            group = head // share
            scores = [exp(float(query @ key[group]) / sqrt(len(query))) for key in keys]
            mixed = sum(score * value[group] for score, value in zip(scores, values, strict=True))
            out.append(mixed / sum(scores))
        return torch.cat(out)

    def heads(self, vector: Tensor, name: str, part: str) -> list[Tensor]:
        return list((self.weights[f"{name}self_attn.{part}.weight"] @ vector).split(self.shape["head_dim"]))

    def queries(self, vector: Tensor, position: int, name: str) -> list[Tensor]:
        return [self.turn(self.norm(head, name + "self_attn.q_norm"), position)
                for head in self.heads(vector, name, "q_proj")]

    def keys(self, vector: Tensor, position: int, name: str) -> list[Tensor]:
        return [self.turn(self.norm(head, name + "self_attn.k_norm"), position)
                for head in self.heads(vector, name, "k_proj")]

    def turn(self, vector: Tensor, position: int) -> Tensor:
        """Rotary position: component i and component i + half turn together by position * theta^(-2i /
        size)."""
        half, turned = len(vector) // 2, vector.clone()
        for index in range(half):
            angle = position * self.shape["rope_parameters"]["rope_theta"] ** (-2 * index / len(vector))
            first, second = float(vector[index]), float(vector[index + half])
            turned[index] = first * cos(angle) - second * sin(angle)
            turned[index + half] = second * cos(angle) + first * sin(angle)
        return turned

    def norm(self, vector: Tensor, name: str) -> Tensor:
        size = sqrt(float(vector @ vector) / len(vector) + self.shape["rms_norm_eps"])
        return vector / size * self.weights[f"{name}.weight"]


def slow_sums(slow: SlowDFlash, tokens: Sequence[int], loss_mask: Sequence[bool], taps: Tensor, slots: int,
              gamma: float, teacher: Tensor | None = None) -> dict[str, float]:
    """What every possible block of one document adds to a training step: weighted losses, weights, accepted
    draft tokens, accepted first tokens, blocks. `teacher` [T, V] are the target's logits: then the loss is
    KL."""
    sums = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for anchor in range(len(tokens) - 1):
        if not (loss_mask[anchor] and loss_mask[anchor + 1]):
            continue
        sums["blocks"] += 1
        logits = slow.logits(taps[:anchor], tokens[anchor], slots)
        accepting = True
        for slot in range(1, slots):
            place = anchor + slot
            if place >= len(tokens) or not loss_mask[place]:
                break
            log_q = logits[slot - 1].log_softmax(-1)
            weight = exp(-(slot - 1) / gamma)
            if teacher is not None:
                log_p = teacher[place - 1].double()[slow.ids].log_softmax(-1)
                sums["loss"] += weight * float((log_p.exp() * (log_p - log_q)).sum())
                sums["count"] += weight
            elif tokens[place] in slow.ids:
                sums["loss"] -= weight * float(log_q[slow.ids.index(tokens[place])])
                sums["count"] += weight
            accepting = accepting and slow.ids[int(log_q.argmax())] == tokens[place]
            sums["accepted"] += accepting
            sums["first"] += accepting and slot == 1
    return sums
