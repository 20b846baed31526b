"""Parts that several drafters share: norm, rotary positions, gated MLP, all in the layout of a Qwen3/Llama
decoder.

Parameter names are those of the exported checkpoints, so `state_dict` needs no renaming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), no biases. x [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int,
                 activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Rotary(nn.Module):
    """cos and sin of positions, any rope type of the field, in the half-split ("neox") layout.

    `parameters` is a config's `rope_parameters`: `rope_theta`, `rope_type` and the keys of that type.
    """

    def __init__(self, head_dim: int, parameters: Mapping[str, Any], max_positions: int) -> None:
        super().__init__()
        kind = parameters.get("rope_type", "default")
        with torch.device("cpu"):  # where values can be looked at, also of a drafter on the device meta
            if kind == "default":
                exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
                inverse, self.scale = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
            else:
                inverse, self.scale = _scaled_frequencies(kind, head_dim, parameters, max_positions)
        if 2 * inverse.numel() != head_dim or not (inverse.isfinite().all() and math.isfinite(self.scale)):
            raise ValueError(f"the target's rope_parameters {dict(parameters)} do not give {head_dim / 2:g} "
                             f"finite frequencies for heads of {head_dim} (head_dim); mend its config.json")
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] int64 -> cos, sin [..., head_dim] float32."""
        angles = positions[..., None].float() * self.inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to x [..., heads, head_dim]; cos, sin [..., head_dim]. Returns x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


def _scaled_frequencies(kind: str, head_dim: int, parameters: Mapping[str, Any],
                        max_positions: int) -> tuple[Tensor, float]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {kind!r} of the target is not known; known are "
                         f"{sorted(ROPE_INIT_FUNCTIONS)}")
    try:
        config = Qwen3Config(head_dim=head_dim, rope_parameters=dict(parameters),
                             max_position_embeddings=max_positions)
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (StrictDataclassError, KeyError, TypeError, AttributeError, RuntimeError,
            ZeroDivisionError) as error:
        raise ValueError(f"the target's rope_parameters {dict(parameters)} cannot be used for rope_type "
                         f"{kind} ({type(error).__name__}: {error}); mend its config.json") from error
