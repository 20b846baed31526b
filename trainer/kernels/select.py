"""Name -> kernel. The configuration names one; an unknown or unavailable one is an error, never a quiet
fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from trainer.errors import UserError
from trainer.kernels.verification import Verification, Verified

BlockAttention = Literal["reference", "flex"]


def training_problem(name: str, device: str | None) -> str | None:
    """Why nothing can be trained with the kernel on `device`; None where it can."""
    return "has no backward pass on the device cpu: take reference there" \
        if (name, device) == ("flex", "cpu") else None


def block_attention(name: str) -> Callable[..., Tensor]:
    """`reference` (any device) or `flex` (CUDA and ROCm training; forward only on a CPU)."""
    if name == "reference":
        from trainer.kernels.reference import block_attention as chosen
    elif name == "flex":
        from trainer.kernels.block_attention import block_attention as chosen
    else:
        raise UserError(f"drafter.attention={name} is not known; choose reference or flex")
    return chosen


def verify(name: str) -> Callable[[Verification], Verified]:
    """`reference` (any device, slow) or `cpu` (logits of a CPU)."""
    if name == "reference":
        from trainer.kernels.verify_reference import verify as chosen
    elif name == "cpu":
        from trainer.kernels.verify_cpu import verify as chosen
    else:
        raise UserError(f"verify={name} is not known; choose reference or cpu")
    return chosen
