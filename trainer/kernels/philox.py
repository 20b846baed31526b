"""Random numbers by place and not by order: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC11) keyed by a request's seed, so that nothing depends on what else is in the batch. """

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ACCEPT, EMIT = 0, 1  # streams
_WORD = 0xFFFFFFFF
Words = Tensor | np.ndarray


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds: counter [4, N] and key [2, N] of 32-bit words in int64, as is what comes back, [4, N]."""
    if counter.device.type == "cpu":  # NumPy needs a third of the time for each of so many small steps
        return torch.from_numpy(np.stack(_rounds(counter.numpy(), key.numpy())))
    return torch.stack(_rounds(counter, key))


def _rounds(counter: Words, key: Words) -> list[Words]:
    first, second, third, fourth = counter
    here, there = key
    for _ in range(10):
        high, low = first * 0xD2511F53, third * 0xCD9E8D57  # the low 64 bits, whatever the sign
        first, third = low >> 32 & _WORD ^ second ^ here, high >> 32 & _WORD ^ fourth ^ there
        second, fourth = low & _WORD, high & _WORD
        here, there = here + 0x9E3779B9 & _WORD, there + 0xBB67AE85 & _WORD
    return [first, second, third, fourth]


def uniform(seed: Tensor, position: Tensor, stream: int, turn: Tensor | None = None) -> Tensor:
    """Numbers in [0, 1) with 53 bits, float64 [N]: seed and position [N] int64, the position that of the
    token whose fate is drawn. `turn`, [N] int64, tells draws of the same position apart."""
    words = torch.full((4, len(position)), stream, device=position.device)
    words[0], words[1], words[3] = position & _WORD, position >> 32 & _WORD, 0 if turn is None else turn
    high, low, _, _ = philox(words, torch.stack([seed & _WORD, seed >> 32 & _WORD]))
    return ((high >> 5).double() * 2.0 ** 26 + (low >> 6).double()) * 2.0 ** -53
