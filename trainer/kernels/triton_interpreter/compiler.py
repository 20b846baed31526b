"""The half of the backend that would compile."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class Interpreted(BaseBackend):
    """Refuses to compile: without TRITON_INTERPRET=1 a kernel has nothing to run on."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict) -> NoReturn:
        raise RuntimeError("kernels are interpreted on this CPU, never compiled: set TRITON_INTERPRET=1")

    def add_stages(self, *given: Any) -> None:
        """There are none."""

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        return {}
