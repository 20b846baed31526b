"""`tools/bench_verify.py`: that it measures both arms on real vLLM; its figures are for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_support import vllm_python

pytestmark = pytest.mark.vllm
TOOL = Path(__file__).parents[2] / "tools/bench_verify.py"


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, "--python", vllm_python(), "--threads", "1", *arguments],
                          capture_output=True, text=True, env={**os.environ, "COLUMNS": "150"})


def test_both_arms_are_timed_in_every_cell(tmp_path: Path) -> None:
    done = call("--vocabulary", "2000", "--requests", "1", "3", "--rounds", "3",
                "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(cell["vocabulary"], cell["requests"], cell["sampling"]) for cell in found["cells"]] == [
        (2000, requests, name) for requests in (1, 3)
        for name in ("greedy", "sampled", "top-k 20, top-p 0.95")]
    for cell in found["cells"]:
        assert set(cell["seconds"]) == {"vllm", "fused"} and 1 <= cell["emitted"] <= 8
        for figure in (*cell["seconds"].values(), cell["ratios"]["vllm"]):
            assert 0 < figure["least"] <= figure["median"] <= figure["most"]
    assert [goal["met"] for goal in found["goals"]] == [cell["ratios"]["vllm"]["median"] > 1
                                                        for cell in found["cells"]]
    assert found["vllm"].startswith("0.32.0") and found["machine"]["kernel"] == "cpu"
    assert done.stdout.count("was wanted") == len(found["cells"])


def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    done = call("--gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["error: --gpu needs a CUDA or ROCm device, and this vLLM computes on "
                                        "cpu: run it where one is, with --python naming a vLLM built for it"]
