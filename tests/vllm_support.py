"""How the tests reach a real vLLM: its interpreter, and settings for a small server on one core."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from trainer.engines import vllm_process
from trainer.engines.vllm_server import VllmServer

PROJECT = Path(__file__).resolve().parent.parent
# The engine computes in its own process, as on a GPU: nearly all of a start is importing, once a process.
FEW_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
FEW = [f"+engine.environment.{name}={value}" for name, value in FEW_PROCESSES.items()]


def vllm_python() -> str:
    """The vLLM interpreter. Without one the test fails: a skipped test would look like a served drafter."""
    python = os.environ.get("TRAINER_VLLM_PYTHON") or str(PROJECT / ".venv-vllm/bin/python")
    if not Path(python).exists():
        pytest.fail(
            f"{python} does not exist: run `make setup`, or set TRAINER_VLLM_PYTHON to a vLLM "
            "environment's interpreter",
            pytrace=False,
        )
    return python


def own_cores() -> list[int]:
    """The cores of this test process, its own first: parallel test processes have different ones."""
    cores = sorted(os.sched_getaffinity(0))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    return cores[own:] + cores[:own]


def small_server(**changes: Any) -> VllmServer:
    """The settings of conf/engine/vllm_server.yaml, made small; keys are dotted names with __ for the dot."""
    settings = OmegaConf.load(PROJECT / "conf/engine/vllm_server.yaml")
    small = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "runtime__kv_cache_gib": 1,
        "environment": FEW_PROCESSES,
        "runtime__threads": str(own_cores()[0]),
    }
    for name, value in (small | changes).items():
        OmegaConf.update(settings, name.replace("__", "."), value)
    return instantiate(settings, _convert_="all")


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.1)


def kill_worker(group: int) -> None:
    """The process with the weights, as by full memory."""
    os.kill(max(vllm_process.members(group), key=resident), signal.SIGKILL)


def resident(process: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return 0


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
