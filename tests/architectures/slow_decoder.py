"""Parts of a decoder in float64, one vector at a time, and what a training step adds up: shared by the slow
references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, exp, sin, sqrt
from typing import Any

import torch
from tiny import random_samples
from torch import Tensor

from trainer.architectures.base import Drafter, Exported
from trainer.records import Batch

SAMPLES = random_samples((24, 13, 19), prompt=6)  # the row on which fast and slow are compared


class SlowDecoder:
    """The tensors and the config behind `exported`, for a target with this embedding and head [V, H]."""

    def __init__(self, exported: Exported, embedding: Tensor, head: Tensor) -> None:
        self.weights = {name: tensor.double() for name, tensor in exported.weights.items()}
        self.shape: dict[str, Any] = exported.geometry
        self.embedding = embedding.double()
        self.head = self.weights.get("lm_head.weight", head.double())
        offsets = exported.weights.get("d2t", torch.zeros(len(self.head), dtype=torch.int64))
        self.ids = [row + int(offset) for row, offset in enumerate(offsets)]  # target id of each draft row

    def attend(self, queries: list[Tensor], keys: list[list[Tensor]], values: list[list[Tensor]]) -> Tensor:
        """Every query head over all keys, given by place and head."""
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

    def mlp(self, after: Tensor, name: str) -> Tensor:
        normed = self.norm(after, name + "post_attention_layernorm")
        gate = self.weights[name + "mlp.gate_proj.weight"] @ normed
        up = self.weights[name + "mlp.up_proj.weight"] @ normed
        return self.weights[name + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

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


def slow_sums(draft: Callable[[int], Tensor], ids: Sequence[int], tokens: Sequence[int],
              loss_mask: Sequence[bool], slots: int, gamma: float, teacher: Tensor | None = None,
              first_anchor: int = 0) -> dict[str, float]:
    """What every possible draft of one document adds to a training step: weighted losses, weights, accepted
    draft tokens, accepted first tokens, drafts. `draft` gives the logits [slots, Vd] after an anchor,
    `teacher` [T, V] are the target's logits: then the loss is KL, else the cross-entropy of the tokens."""
    sums = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for anchor in range(first_anchor, len(tokens) - 1):
        if not (loss_mask[anchor] and loss_mask[anchor + 1]):
            continue
        sums["blocks"] += 1
        logits = draft(anchor)
        accepting = True
        for slot in range(slots):
            place = anchor + 1 + slot
            if place >= len(tokens) or not loss_mask[place]:
                break
            log_q = logits[slot].log_softmax(-1)
            weight = exp(-slot / gamma)
            if teacher is not None:
                log_p = teacher[place - 1].double()[list(ids)].log_softmax(-1)
                sums["loss"] += weight * float((log_p.exp() * (log_p - log_q)).sum())
                sums["count"] += weight
            elif tokens[place] in ids:
                sums["loss"] -= weight * float(log_q[list(ids).index(tokens[place])])
                sums["count"] += weight
            accepting = accepting and ids[int(log_q.argmax())] == tokens[place]
            sums["accepted"] += accepting
            sums["first"] += accepting and slot == 0
    return sums


def check_logits(drafter: Drafter, slow: Any, batch: Batch, places: Sequence[int], trained: Tensor,
                 ids: Sequence[int] | None = None) -> None:
    """Of a drafter that drafts token by token, in training and in drafting. `trained` [places, steps, rows]
    are the logits of training at `places` of the batch; `ids` the tokens of the rows (none: the rows)."""
    steps = trained.shape[1]
    for place, found in zip(places, trained, strict=True):
        own = batch.document == batch.document[place]
        tokens, taps, anchor = batch.tokens[own].tolist(), batch.taps[own], int(batch.position[place])
        slots = min(steps, len(tokens) - anchor)
        expected = slow.draft(tokens, taps, anchor, slots, forced=tokens[anchor + 1:]).float()
        assert expected.std() > 0.5
        torch.testing.assert_close(found[:slots], expected, atol=1e-4, rtol=1e-4)
        free = slow.draft(tokens, taps, anchor, steps).float()
        context = drafter.extend(drafter.new_context(), tokens[:anchor], taps[:anchor])
        torch.testing.assert_close(drafter.draft_logits(context, tokens[anchor], steps), free, atol=1e-4,
                                   rtol=1e-4)
        best = free.argmax(-1).tolist()
        assert drafter.propose(context, tokens[anchor], steps) == [row if ids is None else ids[row]
                                                                   for row in best]
