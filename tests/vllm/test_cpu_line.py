"""The line for a build of vLLM for CPUs that the end of an export prints, given to a shell as it stands."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from runs import Home
from vllm_support import FEW_PROCESSES, own_cores, vllm_python

from trainer.engines import vllm_process
from trainer.engines.vllm_installation import find_installation, free_port

pytestmark = pytest.mark.vllm
SETTINGS = ["recipe=smoke", "hardware.compile=false", "prompts.limit=24", "prompts.heldout=4",
            "train.steps=4", "train.acceptance.every=null", "train.tokens=640",
            "responses.sampling.max_new_tokens=12",
            "engine.runtime.kv_cache_gib=1", "run=[prompts,responses,hidden_states,train,export]"]
PRINTED = "serve it with the CPU build of vLLM that is here: "


def test_the_printed_line_serves_the_drafter(tmp_path: Path) -> None:
    """The machine's memory is nearly all asked for by a server that is not told how much to take; that this
    one was told is seen in its log, whatever is free just now."""
    home = Home(tmp_path / "home", tmp_path / "cache")
    out = home.call(*SETTINGS)
    [line] = [each.removeprefix(PRINTED) for each in out.splitlines() if each.startswith(PRINTED)]
    assert line.split()[1].endswith(".venv-vllm/bin/vllm")
    log, port = tmp_path / "log", free_port()
    variables = find_installation(vllm_python()).environment(str(own_cores()[0]), 7)  # of whatever shell
    del variables["VLLM_CPU_KVCACHE_SPACE"]
    process = vllm_process.start(["sh", "-c", f"{line} --host 127.0.0.1 --port {port} --enforce-eager"],
                                 variables | FEW_PROCESSES | {"HF_HUB_OFFLINE": "1"}, log)
    try:
        deadline = time.monotonic() + 500
        while not _answers(port):
            assert vllm_process.exit_status(process) is None, vllm_process.last_errors(log)
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        [model] = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()["data"]
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", timeout=60, trust_env=False,
                            json={"model": model["id"], "prompt": [10, 20, 30], "max_tokens": 20}).json()
    finally:
        vllm_process.stop(process)
    assert model["max_model_len"] == 1024 and answer["usage"]["completion_tokens"] > 0
    text = log.read_text()
    assert "Explicitly set (1.0/" in text, "room for keys and values by its size"
    assert "method='dflash'" in text and "torch.float32" in text


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
