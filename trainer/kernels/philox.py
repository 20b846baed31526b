"""Random numbers by place and not by order: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC11) keyed by a request's seed, so that nothing depends on what else is in the batch. """

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT, EMIT = 0, 1  # streams
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds: counter [4, N] and key [2, N] of 32-bit words in int64, as is what comes back, [4, N]."""
    multipliers = counter.new_tensor([[0xD2511F53], [0xCD9E8D57]])
    steps = counter.new_tensor([[0x9E3779B9], [0xBB67AE85]])
    even, odd = counter[0::2], counter[1::2]
    for turn in range(10):
        product = even * multipliers  # its low 64 bits, whatever the sign
        even = (product >> 32).bitwise_and_(_WORD).flip(0) ^ odd ^ (key + turn * steps & _WORD)
        odd = product.bitwise_and_(_WORD).flip(0)
    return torch.stack([even, odd], 1).flatten(0, 1)


def uniform(seed: Tensor, position: Tensor, stream: int, turn: Tensor | None = None) -> Tensor:
    """Numbers in [0, 1) with 53 bits, float64 [N]: seed and position [N] int64, the position that of the
    token whose fate is drawn. `turn`, [N] int64, tells draws of the same position apart."""
    words = torch.full((4, len(position)), stream, device=position.device)
    words[0], words[1], words[3] = position & _WORD, position >> 32 & _WORD, 0 if turn is None else turn
    high, low, _, _ = philox(words, torch.stack([seed & _WORD, seed >> 32 & _WORD]))
    return ((high >> 5).double() * 2.0 ** 26 + (low >> 6).double()) * 2.0 ** -53
