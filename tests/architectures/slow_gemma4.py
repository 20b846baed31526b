"""The Gemma 4 assistant once more, one token and one vector at a time in float64, straight from its
equations: what the fast one is compared with. Nothing of trainer/architectures is used but the exported
tensors and their config."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, exp, pi, sin, sqrt, tanh

import torch
from torch import Tensor

from trainer.architectures.base import Exported
from trainer.target_head import TargetHead

SIZES = {"sliding_attention": ("num_key_value_heads", "head_dim"),
         "full_attention": ("num_global_key_value_heads", "global_head_dim")}


class SlowGemma4:
    """The assistant behind `exported`, for the target with this head."""

    def __init__(self, exported: Exported, head: TargetHead) -> None:
        self.weights = {name: tensor.double() if tensor.is_floating_point() else tensor
                        for name, tensor in exported.weights.items()}
        self.text, self.config = exported.geometry["text_config"], exported.flavours["native"]
        self.embedding, self.target_norm = head.embedding.double(), head.norm.double()
        self.target_eps = head.eps

    def draft(self, tokens: Sequence[int], taps: Tensor, anchor: int, slots: int,
              forced: Sequence[int] | None = None) -> Tensor:
        """Logits [slots, V] after tokens[anchor]; the chain reads `forced` tokens, else its own."""
        taps, hidden = taps[:anchor].double(), self.embedding.shape[1]
        state = self.unit(taps[-1, :hidden], self.target_eps) * self.target_norm
        token, found = tokens[anchor], []
        for slot in range(slots):
            both = torch.cat([self.embedding[token] * sqrt(hidden), state])
            stream = self.weights["pre_projection.weight"] @ both
            for layer, kind in enumerate(self.text["layer_types"]):
                stream = self.layer(stream, f"model.layers.{layer}.", kind, taps, anchor - 1)
            normed = self.norm(stream, "model.norm")
            state = self.weights["post_projection.weight"] @ normed
            found.append(self.logits(normed))
            token = int(found[-1].argmax()) if forced is None else forced[slot] if slot < len(forced) else 0
        return torch.stack(found)

    def layer(self, stream: Tensor, name: str, kind: str, taps: Tensor, position: int) -> Tensor:
        read = self.norm(stream, name + "input_layernorm")
        mixed = self.weights[name + "self_attn.o_proj.weight"] @ self.attend(read, name, kind, taps, position)
        stream = stream + self.norm(mixed, name + "post_attention_layernorm")
        read = self.norm(stream, name + "pre_feedforward_layernorm")
        gate, up = (self.weights[f"{name}mlp.{part}_proj.weight"] @ read for part in ("gate", "up"))
        bent = torch.tensor([0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))
                             for x in gate.tolist()], dtype=torch.float64)
        after = self.weights[name + "mlp.down_proj.weight"] @ (bent * up)
        stream = stream + self.norm(after, name + "post_feedforward_layernorm")
        return stream * self.weights[name + "layer_scalar"]

    def attend(self, read: Tensor, name: str, kind: str, taps: Tensor, position: int) -> Tensor:
        """Every query head over the target's keys up to `position`."""
        groups, size = (self.text[key] for key in SIZES[kind])
        start = self.embedding.shape[1]
        for before in sorted({*self.text["layer_types"]}):  # the parts of a row of taps
            if before == kind:
                break
            start += 2 * self.text[SIZES[before][0]] * self.text[SIZES[before][1]]
        width, out = groups * size, []
        first = max(0, position + 1 - self.text["sliding_window"]) if kind == "sliding_attention" else 0
        queries = (self.weights[name + "self_attn.q_proj.weight"] @ read).split(size)
        for head, query in enumerate(queries):
            turned = self.turn(self.norm(query, name + "self_attn.q_norm"), kind, position)
            group = head * groups // len(queries)
            scores, total = 0.0, torch.zeros(size, dtype=torch.float64)
            for row in taps[first:position + 1]:
                key, value = (row[begin + group * size:begin + (group + 1) * size]
                              for begin in (start, start + width))
                weight = exp(float(turned @ key))
                scores, total = scores + weight, total + weight * value
            out.append(total / scores)
        return torch.cat(out)

    def turn(self, vector: Tensor, kind: str, position: int) -> Tensor:
        rope, half, turned = self.text["rope_parameters"][kind], len(vector) // 2, vector.clone()
        for index in range(int(half * rope.get("partial_rotary_factor", 1.0))):
            angle = position * rope["rope_theta"] ** (-index / half)
            first, second = float(vector[index]), float(vector[index + half])
            turned[index] = first * cos(angle) - second * sin(angle)
            turned[index + half] = second * cos(angle) + first * sin(angle)
        return turned

    def logits(self, normed: Tensor) -> Tensor:
        rows = self.weights["model.embed_tokens.weight"]
        if not self.config["use_ordered_embeddings"]:
            cap = self.text["final_logit_softcapping"]
            return cap * torch.tanh(rows @ normed / cap)
        scores = self.weights["masked_embedding.centroids.weight"] @ normed
        best = sorted(range(len(scores)), key=lambda cluster: -float(scores[cluster]))
        size, found = len(rows) // len(scores), {}
        for cluster in best[:self.config["centroid_intermediate_top_k"]]:
            for token in self.weights["masked_embedding.token_ordering"][cluster * size:
                                                                         (cluster + 1) * size].tolist():
                found[token] = float(rows[token] @ normed)
        floor = min(found.values()) - 1
        return torch.tensor([found.get(token, floor) for token in range(len(rows))], dtype=torch.float64)

    def norm(self, vector: Tensor, name: str) -> Tensor:
        return self.unit(vector, self.text["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    @staticmethod
    def unit(vector: Tensor, eps: float) -> Tensor:
        return vector / sqrt(float(vector @ vector) / len(vector) + eps)
