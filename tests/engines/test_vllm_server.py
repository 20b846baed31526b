"""A real vLLM server: what it answers, how its end is told, and that it never outlives us."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_support import PROJECT, kill_worker, small_server, vllm_python, wait_until

from trainer.engines import vllm_process
from trainer.engines.vllm_client import SpecCounters
from trainer.engines.vllm_request import request
from trainer.engines.vllm_scores import score
from trainer.engines.vllm_server import RunningServer
from trainer.errors import UserError
from trainer.records import Completion, Sampling
from trainer.target_made import Kept, RandomLlama

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
        scale=0.2,
        runtime=Kept(str(tmp_path_factory.mktemp("cache"))),
    ).folder()


@pytest.fixture(scope="module")
def running(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With all the processes that vLLM starts by itself."""
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    few = small_server(python=vllm_python(), environment={},
                       arguments=["--no-enable-prefix-caching", "--max-num-batched-tokens", "256"])
    with few.serve(target, log) as server:
        yield server


def test_the_method_is_always_explicit(tmp_path: Path) -> None:
    server = small_server(arguments=["--seed", 1])
    words = server.command("python", tmp_path, 1234, tmp_path / "drafter", "dflash", 7)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "num_speculative_tokens": 7,
        "model": str(tmp_path / "drafter"),
    }
    assert words[-2:] == ["--seed", "1"]
    words = server.command("python", tmp_path, 1234, method="suffix", k=3)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "suffix", "num_speculative_tokens": 3, "suffix_decoding_max_cached_requests": 0}
    with pytest.raises(ValueError, match="needs its method and k"):
        server.serve(tmp_path, tmp_path / "log", speculator=tmp_path / "drafter")


def test_seeds_follow_the_key_and_nothing_else() -> None:
    bodies = [
        request("target", [1], Sampling(1, 1.0, 1.0, seed), key, ()) for seed in (0, 1) for key in ("a", "b")
    ]
    assert len({body["seed"] for body in bodies}) == 4
    assert bodies[0] == request("target", [1], Sampling(1, 1.0, 1.0, 0), "a", ())
    assert all(0 <= body["seed"] < 2**31 for body in bodies)


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

    def test_seeds_and_more_prompts_than_a_step_takes(self, running: RunningServer) -> None:
        """A CPU build ends when it reads such a prompt in pieces."""
        prompts = [[number + 1] * 150 for number in range(6)]
        sampling = Sampling(max_new_tokens=2, temperature=1.0, top_p=1.0, seed=0)
        together = running.complete(prompts, sampling, 6)
        assert [one.tokens for one in together] \
            == [one.tokens for one in running.complete(prompts, sampling, 1)]

    def test_an_end_token_ends_and_is_kept(self, running: RunningServer) -> None:
        answer = running.complete(PROMPTS[:1], GREEDY, 1)[0].tokens
        end = next(token for token in answer[1:] if token != answer[0])
        cut = running.complete(PROMPTS[:1], GREEDY, 1, end_ids=[end])[0]
        assert cut.tokens == answer[: answer.index(end) + 1] and cut.finish_reason == "stop"

    def test_likelihoods_are_those_of_the_model(self, running: RunningServer, target: Path) -> None:
        async def ask() -> list[list[float]]:
            async with httpx.AsyncClient(**running.client.options) as http:
                return [await score(index, row, running, http) for index, row in enumerate(PROMPTS)]

        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        for row, found in zip(PROMPTS, asyncio.run(ask()), strict=True):
            with torch.inference_mode():
                shares = model(torch.tensor([row])).logits[0].log_softmax(-1)
            wanted = [float(shares[place, token]) for place, token in enumerate(row[1:])]
            assert found == pytest.approx(wanted, abs=1e-3)

    def test_all_ways_to_sample_are_taken(self, running: RunningServer) -> None:
        """Of one token there is no choice, and one that is repeated at a high price is not said again."""
        def said(**changes: float) -> list[tuple[int, ...]]:
            return [each.tokens for each in running.complete(PROMPTS, replace(GREEDY, **changes), 4)]

        assert said() == said(temperature=1.0, top_k=1) == said(temperature=1.0, min_p=1.0)
        for prompt, answer in zip(PROMPTS, said(repetition_penalty=100.0), strict=True):
            assert len({*prompt, *answer}) == len(prompt) + len(answer)

    def test_a_refusal_is_passed_on(self, running: RunningServer) -> None:
        with pytest.raises(UserError, match=r"refused request 1 \(300 prompt tokens.*with 400: .*256"):
            running.complete([PROMPTS[0], [1] * 300], GREEDY, 2)

    def test_no_counters_without_a_drafter(self, running: RunningServer) -> None:
        assert running.counters() == SpecCounters(0, 0, 0, ())

    def test_one_that_answers_others_is_not_idle(self, running: RunningServer,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trainer.engines.vllm_client.IDLE_SECONDS", 0.0)
        long = Sampling(max_new_tokens=240, temperature=0.0, top_p=1.0, seed=0)
        enough = threading.Event()

        def ask_until_enough() -> None:
            while not enough.is_set():  # one answer may be over before the counters are read once
                running.complete(PROMPTS, long, 4)

        with ThreadPoolExecutor(1) as other:
            asked = other.submit(ask_until_enough)
            try:
                with pytest.raises(UserError, match=r"has \d requests of others to answer, and what"):
                    while not asked.done():
                        running.require_idle()
            finally:
                enough.set()
            asked.result()
        monkeypatch.undo()
        running.require_idle()

    def test_joined_by_its_address(self, running: RunningServer, target: Path, tmp_path: Path) -> None:
        other = small_server(url=running.url + "/v1/", python="/nowhere")
        with other.serve(target, tmp_path / "unused.log") as joined:
            assert (joined.version, joined.served_name, joined.command) == (running.version, "target", [])
            assert (joined.attention_backend, running.attention_backend) == ("unknown", "CPU_ATTN")
            assert (
                joined.complete(PROMPTS, GREEDY, 2)[3].tokens
                == running.complete(PROMPTS, GREEDY, 2)[3].tokens
            )
        assert httpx.get(f"{running.url}/health").status_code == 200, "a joined server is left running"
        with (
            pytest.raises(UserError, match="counts no drafts in its /metrics where 5 were expected"),
            other.serve(target, tmp_path / "unused.log", method="dflash", k=5),
        ):
            pass

    def test_a_worker_killed_in_the_middle(self, running: RunningServer) -> None:
        """The last test with the shared server. The process with the weights is killed, as by full memory."""
        done: list[int] = []

        def kill_after_some(index: int, answer: Completion) -> None:
            done.append(index)
            if len(done) == 3:
                kill_worker(running.process.pid)

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
