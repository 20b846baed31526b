"""Losses of single positions and the weights of positions in a block. All in float32, none reduced.

Formulas: hard cross-entropy is DFlash's own loss; forward KL is `sum p (log p - log q)` over the draft
vocabulary, with both distributions renormalised on it. The fixed decay is `exp(-(k - 1) / gamma)` for slot k
>= 1. """

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [n, V], labels [n] int64 -> [n] float32."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def forward_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || draft); logits and teacher [n, V] -> [n] float32. The teacher gets no gradient."""
    target = teacher.detach().float().log_softmax(-1)
    return (target.exp() * (target - logits.float().log_softmax(-1))).sum(-1)


def decay_weights(slots: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """Weights [slots] float32 of slots 1..slots."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32, device=device) / gamma)
