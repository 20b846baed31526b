"""vLLM's build for CPUs: where set-up puts it, and what it has to be told by whoever starts it.

Untold it takes 0.92 of the memory, and does not start where less is free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.ranges import Count, Dtype, SequenceLength, Text

ENVIRONMENT = ".venv-vllm"
# it ends where a prompt sampled with a seed is read in pieces: generators have no offset there
WHOLE_PROMPTS = "no-enable-chunked-prefill"


@dataclass(frozen=True)
class CpuServer:
    """How people start a server for CPUs: with `kv_cache_gib` for keys and values, and sequences of up to
    `max_model_len` tokens. `program` is vLLM's, by its path where that is known."""

    dtype: Dtype
    max_model_len: SequenceLength
    kv_cache_gib: Count
    program: Text = "vllm"

    @property
    def variables(self) -> dict[str, str]:
        return room(self.kv_cache_gib)

    @property
    def flags(self) -> dict[str, Any]:
        """By their names without dashes; true: the flag alone."""
        return {"dtype": self.dtype, "max-model-len": self.max_model_len, WHOLE_PROMPTS: True}


def room(kv_cache_gib: int) -> dict[str, str]:
    """Variables of a server that takes so much memory for keys and values, and no share of the machine's."""
    return {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}


def here(server: CpuServer | None) -> CpuServer | None:
    """The same with the program of the environment that set-up made; None without one."""
    environment = own_environment()
    if server is None or environment is None:
        return None
    return replace(server, program=str(environment / "bin/vllm"))


def own_environment() -> Path | None:
    """The environment that `make setup` makes, beside the project or in the current folder."""
    project = Path(__file__).resolve().parents[1]
    return next((folder / ENVIRONMENT for folder in (project, Path.cwd())
                 if (folder / ENVIRONMENT / "bin/python").exists()), None)
