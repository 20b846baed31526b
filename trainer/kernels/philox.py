"""Random numbers by place and not by order: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC11) keyed by a request's seed, so that nothing depends on what else is in the batch.

NumPy reckons them, for steps are small and PyTorch takes several times as long for each small call; so do two
words at once in place of one. """

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ACCEPT, EMIT = 0, 1  # streams
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # of the first and the third word
_STEPS = np.array([[[step * 0x9E3779B9], [step * 0xBB67AE85]] for step in range(10)], dtype=np.uint64)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds: counter [4, N] and key [2, N] of 32-bit words in int64, as is what comes back, [4, N]."""
    even, odd = _rounds(_bits(counter), _bits(key))
    return torch.from_numpy(np.stack([even[0], odd[0], even[1], odd[1]]).view(np.int64)).to(counter.device)


def uniform(seed: Tensor, position: Tensor, stream: int, turn: Tensor | None = None) -> Tensor:
    """Numbers in [0, 1) with 53 bits, float64 [N]: seed and position [N] int64, the position that of the
    token whose fate is drawn. `turn`, [N] int64, tells draws of the same position apart."""
    words, keys = np.zeros((4, len(position)), np.uint64), np.empty((2, len(position)), np.uint64)
    for halves, whole in ((words, _bits(position)), (keys, _bits(seed))):
        np.bitwise_and(whole, _WORD, out=halves[0])
        np.right_shift(whole, _HALF, out=halves[1])
    words[2] = stream
    if turn is not None:
        words[3] = _bits(turn)
    (high, _), (low, _) = _rounds(words, keys)
    numbers = ((high >> np.uint64(5)) * 2.0 ** 26 + (low >> np.uint64(6))) * 2.0 ** -53
    return torch.from_numpy(numbers).to(position.device)


def _bits(words: Tensor) -> np.ndarray:
    """The same as uint64, on the host."""
    return words.cpu().numpy().view(np.uint64)


def _rounds(counter: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the third word, and the other two, [2, N] each."""
    even, odd = counter[::2], counter[1::2]
    for here in key + _STEPS & _WORD:
        product = (even * _FACTORS)[::-1]  # 32 bits by 32
        even, odd = product >> _HALF ^ odd ^ here, product & _WORD
    return even, odd
