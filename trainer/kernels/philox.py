"""Random numbers by place and not by order: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC11) keyed by a request's seed, so that nothing depends on what else is in the batch. """

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT, EMIT = 0, 1  # streams
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
           ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds; every word is an int64 tensor of 32-bit values, and so is what comes back."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # their low 64 bits, whatever the sign
        c0, c1, c2, c3 = ((second >> 32) & _WORD ^ c1 ^ k0, second & _WORD,
                          (first >> 32) & _WORD ^ c3 ^ k1, first & _WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, stream: int, turn: Tensor | None = None) -> Tensor:
    """Numbers in [0, 1) with 53 bits, float64 of the shape of `position`: seed and position int64, the
    position that of the token whose fate is drawn. `turn`, int64, tells draws of the same position apart."""
    turn = torch.zeros_like(position) if turn is None else turn
    counter = (position & _WORD, (position >> 32) & _WORD, torch.full_like(position, stream), turn)
    high, low, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((high >> 5).double() * 2.0 ** 26 + (low >> 6).double()) * 2.0 ** -53
