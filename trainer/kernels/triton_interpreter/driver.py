"""The half of the backend that stands for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Processor(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled for it")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def seconds(call: Callable[[], Any], *, quantiles: Sequence[float], **_: Any) -> list[float]:
            start = time.perf_counter()
            call()
            return [1000 * (time.perf_counter() - start)] * len(quantiles)

        return seconds
