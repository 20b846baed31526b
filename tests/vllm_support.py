"""How the tests reach a real vLLM: its interpreter, and settings for a small server that is content with one
core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from trainer.engines.vllm_server import VllmServer

PROJECT = Path(__file__).resolve().parent.parent


def vllm_python() -> str:
    """The vLLM interpreter; without one the test fails, since a skipped test of serving would look like a
    passed one."""
    python = os.environ.get("TRAINER_VLLM_PYTHON") or str(PROJECT / ".venv-vllm/bin/python")
    if not Path(python).exists():
        pytest.fail(
            f"{python} does not exist: run `make setup`, or set TRAINER_VLLM_PYTHON to a vLLM "
            "environment's interpreter",
            pytrace=False,
        )
    return python


def small_server(**changes: Any) -> VllmServer:
    """The settings of conf/engine/vllm_server.yaml, made small; keys are dotted names with __ for the dot."""
    settings = OmegaConf.load(PROJECT / "conf/engine/vllm_server.yaml")
    core = str(min(os.sched_getaffinity(0)))
    small = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "runtime__kv_cache_gib": 1,
        "runtime__threads": core,
    }
    for name, value in (small | changes).items():
        OmegaConf.update(settings, name.replace("__", "."), value)
    return instantiate(settings, _convert_="all")
