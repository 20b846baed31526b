"""Name -> kernel. The configuration names one; an unknown or unavailable one is an error, never a quiet
fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from trainer.errors import UserError

BlockAttention = Literal["reference", "flex"]


def block_attention(name: str) -> Callable[..., Tensor]:
    """`reference` (any device) or `flex` (CUDA and ROCm training; forward only on a CPU)."""
    if name == "reference":
        from trainer.kernels.reference import block_attention as chosen
    elif name == "flex":
        from trainer.kernels.block_attention import block_attention as chosen
    else:
        raise UserError(f"drafter.attention={name} is not known; choose reference or flex")
    return chosen
