"""Block attention through FlexAttention: the same function as `reference.block_attention`, without dense
scores.

All blocks of a row are one long query; its keys are the context followed by the blocks. Only tiles that some
block can see are computed. Runs on CUDA and ROCm; on a CPU PyTorch has the forward pass alone, which is what
the tests compare with the reference. """

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def block_attention(query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor,
                    block_value: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """Shapes as in `reference.block_attention`: query [A, S, heads, D], context_* [T, kv_heads, D],
    block_* [A, O, kv_heads, D], visible [A, T] bool; returns [A, S, heads, D]. `scale` as there."""
    anchors, slots = query.shape[:2]
    mask = _mask(visible, slots, block_key.shape[1])
    keys = torch.cat([context_key, block_key.flatten(0, 1)]).transpose(0, 1)[None]
    values = torch.cat([context_value, block_value.flatten(0, 1)]).transpose(0, 1)[None]
    mixed = flex_attention(query.flatten(0, 1).transpose(0, 1)[None], keys, values, block_mask=mask,
                           scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1).unflatten(0, (anchors, slots))


def _mask(visible: Tensor, slots: int, own: int) -> BlockMask:
    anchors, tokens = visible.shape

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // slots
        inside = key >= tokens
        return torch.where(inside, (key - tokens) // max(own, 1) == block,
                           visible[block, key.clamp(max=tokens - 1)])

    return create_block_mask(allowed, None, None, anchors * slots, tokens + anchors * own,
                             device=visible.device)
