"""Every operation that has, or will have, a fused twin, in plain PyTorch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def block_attention(query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor,
                    block_value: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """Attention of anchored blocks: every slot sees some context tokens and all keys of its own block.

    query [A, S, heads, D]; context_key, context_value [T, kv_heads, D]; block_key, block_value [A, O,
    kv_heads, D], O = 0 for none; visible [A, T] bool, the same for all slots of a block. Returns [A, S,
    heads, D] in query's dtype; scores and softmax are float32. A blocks of S slots with O own keys, T context
    tokens, D head dimension. Scores are times `scale` (null: 1 / sqrt(D)). """
    anchors, slots, heads, size = query.shape
    groups = context_key.shape[1]
    share = heads // groups
    grouped = query.view(anchors, slots, groups, share, size)
    wide = grouped.permute(2, 0, 1, 3, 4).reshape(groups, anchors * slots * share, size)
    context = torch.matmul(wide, context_key.permute(1, 2, 0)).float()
    context = context.view(groups, anchors, slots * share, len(context_key))
    context = context.masked_fill(~visible[None, :, None, :], float("-inf"))
    own = torch.einsum("asgqd,atgd->gasqt", grouped, block_key).float()
    own = own.reshape(groups, anchors, slots * share, block_key.shape[1])
    scores = torch.cat([context, own], dim=-1) * (size ** -0.5 if scale is None else scale)
    weights = scores.softmax(dim=-1).to(query.dtype)
    tokens = context_key.shape[0]
    from_context = torch.matmul(weights[..., :tokens].reshape(groups, anchors * slots * share, tokens),
                                context_value.transpose(0, 1))
    from_block = torch.einsum("gasqt,atgd->gasqd",
                              weights[..., tokens:].unflatten(2, (slots, share)), block_value)
    mixed = from_context.view(groups, anchors, slots, share, size) + from_block
    return mixed.permute(1, 2, 0, 3, 4).reshape(anchors, slots, heads, size)
