"""Name -> kernel. The configuration names one; an unknown or unavailable one is an error, never a quiet
fallback."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from trainer.errors import UserError
from trainer.kernels.verification import Verification, Verified

BlockAttention = Literal["reference", "flex"]
Verify = Literal["reference", "cpu", "triton"]


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
    """`reference` (any device, slow), `cpu` (logits of a CPU) or `triton` (CUDA and ROCm; in a process with
    TRITON_INTERPRET=1 a CPU, slowly)."""
    if name == "reference":
        from trainer.kernels.verify_reference import verify as chosen
    elif name == "cpu":
        from trainer.kernels.verify_cpu import verify as chosen
    elif name == "triton":
        if find_spec("triton") is None:
            raise UserError("verify=triton needs the package triton, which is not installed; install it, or "
                            "choose cpu or reference")
        from trainer.kernels.verify_triton import problem
        from trainer.kernels.verify_triton import verify as chosen
        if missing := problem():
            raise UserError(f"verify=triton cannot run here: {missing}; choose cpu or reference")
    else:
        raise UserError(f"verify={name} is not known; choose reference, cpu or triton")
    return chosen


def require_verify(name: str, device: str) -> None:
    """Raises UserError unless the kernel is there and takes the logits of a target on `device`."""
    if name == "cpu" and device != "cpu":
        raise UserError(f"hardware.verify=cpu needs the logits of a CPU, but the target computes on "
                        f"{device}; set hardware.verify=triton or reference")
    if name == "triton" and device == "cpu":
        raise UserError("hardware.verify=triton needs the logits of a CUDA or ROCm device, but the target "
                        "computes on cpu; set hardware.verify=cpu or reference")
    try:
        verify(name)
    except UserError as error:
        raise UserError(f"hardware.{error}") from error
