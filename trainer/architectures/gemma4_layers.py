"""A decoder layer without keys of its own, in the layout of a Gemma 4: it asks with queries what the target
keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn, ones
from torch.nn import functional as F

from trainer.architectures.gemma4_geometry import attention_shape
from trainer.architectures.layers import GatedMLP, RMSNorm, rotate


@dataclass(frozen=True)
class Sight:
    """What the queries of A drafts read in every step, by kind of attention: the target's keys and values [T,
    kv_heads, D], which of them each draft sees [A, T], and cos and sin [A, 1, D] of its constant position."""

    shared: dict[str, tuple[Tensor, Tensor]]
    visible: dict[str, Tensor]
    turns: dict[str, tuple[Tensor, Tensor]]


class QueryLayer(nn.Module):
    """Norms before and after each half, and a scalar on the whole; `shape` is a `text_config`."""

    def __init__(self, shape: dict[str, Any], kind: str, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        hidden, eps = shape["hidden_size"], shape["rms_norm_eps"]
        self.kind = kind
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = QueryAttention(shape, attention_shape(shape, kind)[1], attend)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, shape["intermediate_size"], partial(F.gelu, approximate="tanh"))
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(ones(1))

    def forward(self, stream: Tensor, sight: Sight) -> Tensor:
        """stream [A, 1, H]."""
        mixed = self.self_attn(self.input_layernorm(stream), *sight.shared[self.kind],
                               sight.visible[self.kind], sight.turns[self.kind])
        stream = stream + self.post_attention_layernorm(mixed)
        after = self.mlp(self.pre_feedforward_layernorm(stream))
        return (stream + self.post_feedforward_layernorm(after)) * self.layer_scalar


class QueryAttention(nn.Module):
    def __init__(self, shape: dict[str, Any], size: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        width = shape["num_attention_heads"] * size
        self.q_proj = nn.Linear(shape["hidden_size"], width, bias=False)
        self.o_proj = nn.Linear(width, shape["hidden_size"], bias=False)
        self.q_norm = RMSNorm(size, shape["rms_norm_eps"])

    def forward(self, read: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
                turns: tuple[Tensor, Tensor]) -> Tensor:
        query = rotate(self.q_norm(self.q_proj(read).unflatten(-1, (-1, self.size))), *turns)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        none = keys.new_zeros(len(read), 0, *keys.shape[1:])
        # scores are not divided by anything: norms keep queries and keys small
        return self.o_proj(self.attend(query, keys, values, none, none, visible, scale=1.0).flatten(-2))
