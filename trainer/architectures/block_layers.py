"""Decoder layers of the block drafters: a block attends to context keys made elsewhere, and to itself.

Parameter names are those of the exported checkpoints. The same key and value projections serve context
features and block tokens (vLLM's `qwen3_dflash.py` does the same in `precompute_and_store_context_kv`). """

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.architectures.layers import GatedMLP, RMSNorm, rotate


class BlockLayer(nn.Module):
    """One pre-norm decoder layer over a block; keys and values of the context come from outside."""

    def __init__(self, shape: dict[str, Any], attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape["hidden_size"], shape["rms_norm_eps"])
        self.self_attn = BlockAttention(shape, attend)
        self.post_attention_layernorm = RMSNorm(shape["hidden_size"], shape["rms_norm_eps"])
        self.mlp = GatedMLP(shape["hidden_size"], shape["intermediate_size"])

    @torch.no_grad()
    def start_from(self, tensors: dict[str, Tensor]) -> None:
        """Copies what a target layer has of the same name and shape. The query norm takes the scale of
        queries and keys together, so that attention starts as sharp: that of the target's norms or, where
        it has none, the one that its projections give to a stream of unit variance."""
        for name, parameter in self.named_parameters():
            if name in tensors and tensors[name].shape == parameter.shape:
                parameter.copy_(tensors[name])
        scales = []
        for part in ("q", "k"):
            weight = getattr(self.self_attn, f"{part}_proj").weight * self.input_layernorm.weight
            scale = weight.unflatten(0, (-1, self.self_attn.size)).pow(2).sum(-1).mean(0).sqrt()
            scales.append(tensors.get(f"self_attn.{part}_norm.weight", scale))
        turned = scales[1].unflatten(0, (2, -1)).pow(2).mean(0).sqrt()  # what turns together has one scale
        self.self_attn.q_norm.weight.copy_(scales[0] * turned.repeat(2))
        self.self_attn.k_norm.weight.fill_(1.0)

    def forward(self, stream: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
                turns: tuple[Tensor, Tensor]) -> Tensor:
        """stream [A, S, H]; keys, values [T, kv_heads, D] of the context; visible [A, T]; turns: cos and sin
        [A, S, D]."""
        stream = stream + self.self_attn(self.input_layernorm(stream), keys, values, visible, turns)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class BlockAttention(nn.Module):
    """The same key and value projections serve context features and block tokens.

    The key norm's weight stays 1 and the query norm learns the scale of both: vLLM's builds for CPU (0.32)
    and XPU (some) norm the context keys of every layer with the weight of the first.
    """

    def __init__(self, shape: dict[str, Any], attend: Callable[..., Tensor]) -> None:
        super().__init__()
        hidden, size = shape["hidden_size"], shape["head_dim"]
        self.size, self.attend = size, attend
        self.q_proj = nn.Linear(hidden, shape["num_attention_heads"] * size, bias=False)
        self.k_proj = nn.Linear(hidden, shape["num_key_value_heads"] * size, bias=False)
        self.v_proj = nn.Linear(hidden, shape["num_key_value_heads"] * size, bias=False)
        self.o_proj = nn.Linear(shape["num_attention_heads"] * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, shape["rms_norm_eps"])
        self.k_norm = RMSNorm(size, shape["rms_norm_eps"]).requires_grad_(False)

    def keys_values(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """features [..., H] -> rotated keys and values [..., kv_heads, D]."""
        keys = self.k_norm(self.k_proj(features).unflatten(-1, (-1, self.size)))
        return rotate(keys, cos, sin), self.v_proj(features).unflatten(-1, (-1, self.size))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
                turns: tuple[Tensor, Tensor]) -> Tensor:
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size))), *turns)
        own_keys, own_values = self.keys_values(x, *turns)
        return self.o_proj(self.attend(query, keys, values, own_keys, own_values, visible).flatten(-2))
