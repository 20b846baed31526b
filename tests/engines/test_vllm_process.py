"""The process group of a server, with a shell in place of vLLM, and what a log says."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from vllm_support import wait_until

from trainer.engines import vllm_process


def test_the_last_errors_name_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            [
                "(EngineCore pid=7) ERROR 11-29 17:03:04 [core.py:15] ValueError: head size 16 is unknown",
                "(EngineCore pid=7) ERROR 11-29 17:03:04 [core.py:15]     raise RuntimeError('x')",
                "RuntimeError: Engine core initialization failed. See root cause above.",
                "(APIServer pid=6) INFO 11-29 17:03:04 [core_client.py:777] [shutdown] MPClient: complete",
                "nanobind: leaked 4 instances!",
                ' - leaked type "a"',
            ]
        )
    )
    assert vllm_process.last_errors(log) == ["ValueError: head size 16 is unknown"]
    log.write_text("one\n\ntwo\nthree\n")
    assert vllm_process.last_errors(log) == ["two", "three"]


@pytest.mark.parametrize(("log", "found"), [
    ("INFO [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
     "FLASH_ATTN"),
    ("INFO [cuda.py:446] Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
    ("INFO [rocm.py:750] Using TRITON_ATTN backend (selected via --attention-backend).", "TRITON_ATTN"),
    ("Found incompatible backend(s) [ROCM_ATTN] with decoder. Overriding with ROCM_AITER_UNIFIED_ATTN out of "
     "potential backends: ['TRITON_ATTN'].", "ROCM_AITER_UNIFIED_ATTN"),
    ("Using TRITON_MLA backend.\nUsing FLASH_ATTN backend.\nUsing TRITON_MLA backend.",
     "TRITON_MLA, FLASH_ATTN"),
    ("Initializing a V1 LLM engine with config: device_config=cpu, enforce_eager=True", "CPU_ATTN"),
    ("device_config=cpu\nINFO [cpu.py:175] Using CPU_MLA backend.", "CPU_MLA"),
    ("device_config=cuda\nCannot use FLASHINFER backend on CPU.\nUsing TRITON Mxfp4 MoE backend.\n"
     "Using AITER backend for FP8\nUsing backend TORCH_SDPA for vit attention", None)])
def test_the_attention_backend_by_the_log(tmp_path: Path, log: str, found: str | None) -> None:
    (tmp_path / "log").write_text(log)
    assert vllm_process.attention_backend(tmp_path / "log") == found


class TestProcessGroup:
    """With a shell in place of vLLM: the group is what matters."""

    def start(self, script: str, folder: Path) -> subprocess.Popen[bytes]:
        return vllm_process.start(["sh", "-c", script], dict(os.environ), folder / "log")

    def test_stop_ends_the_whole_group(self, tmp_path: Path) -> None:
        process = self.start("sleep 600 & sleep 600 & exec sleep 600", tmp_path)
        wait_until(lambda: len(vllm_process.members(process.pid)) == 4, 10, "the shell's children run")
        vllm_process.stop(process)
        assert vllm_process.members(process.pid) == []
        vllm_process.stop(process)  # a second call is harmless

    def test_what_ignores_a_polite_request_is_killed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_process, "GRACE_SECONDS", 0.5)
        process = self.start("trap '' TERM; echo ready; while true; do sleep 0.1; done", tmp_path)
        wait_until(lambda: "ready" in (tmp_path / "log").read_text(), 10, "the signal is ignored")
        vllm_process.stop(process)
        assert vllm_process.members(process.pid) == []

    @pytest.mark.parametrize(
        ("script", "words"),
        [("exit 3", "exit code 3"), ("kill -9 $$", "signal SIGKILL"), ("exit 0", "exit code 0")],
    )
    def test_an_end_is_described_and_leaves_nobody(self, tmp_path: Path, script: str, words: str) -> None:
        process = self.start(f"sleep 600 & {script}", tmp_path)
        wait_until(lambda: vllm_process.exit_status(process) is not None, 10, "the shell ends")
        assert vllm_process.members(process.pid) == [], "the watcher has ended what the shell left behind"
        assert vllm_process.describe_exit(vllm_process.exit_status(process)) == words
        vllm_process.stop(process)

    def test_a_killed_watcher_is_noticed(self, tmp_path: Path) -> None:
        process = self.start("exec sleep 600", tmp_path)
        wait_until(lambda: len(vllm_process.members(process.pid)) == 2, 10, "the command runs")
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: vllm_process.exit_status(process) == -signal.SIGKILL, 10, "its end is seen")
        vllm_process.stop(process)
        assert vllm_process.members(process.pid) == []
