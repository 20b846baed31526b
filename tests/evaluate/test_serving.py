"""Speed, acceptance and comparison of servers; the counts come from real vLLM with n-gram drafts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vllm_support import small_server, vllm_python

from trainer.engines import vllm_process
from trainer.engines.vllm_client import SpecCounters
from trainer.engines.vllm_server import RunningServer
from trainer.errors import UserError
from trainer.evaluate.serving import Comparison, Measurement, acceptance, compare, enter, measure
from trainer.records import Completion, Sampling
from trainer.target_made import Kept, RandomLlama

K = 4


def passed(*outputs: tuple[int, ...], drafts: int = 0) -> Measurement:
    """A measurement that gave these tokens."""
    counters = SpecCounters(drafts, drafts * K, 0, (0,) * K if drafts else ())
    return Measurement(
        [Completion(tokens, "length") for tokens in outputs], 1.0, 1, 1.0, counters, 1.0, 0.0, ()
    )


def test_equal_tokens_are_lossless() -> None:
    assert compare(passed((1, 2), (3,)), passed((1, 2), (3,), drafts=9)) == Comparison(lossless=True)


@pytest.mark.parametrize(
    ("plain", "drafted", "position"),
    [
        ((1, 2, 3), (1, 9, 3), 1),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2), (1, 2, 3), 2),
        ((1,), (2,), 0),
    ],
)
def test_the_first_difference_is_found(
    plain: tuple[int, ...], drafted: tuple[int, ...], position: int
) -> None:
    found = compare(passed((5,), plain, (6,)), passed((5,), drafted, (7,)))
    assert found == Comparison(lossless=False, differing=2, prompt=1, position=position)


def test_a_plain_server_that_drafts_is_refused() -> None:
    with pytest.raises(UserError, match="plain measurement drafted as well"):
        compare(passed((1,), drafts=3), passed((1,), drafts=3))


def test_passes_over_different_prompts_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(passed((1,), (2,)), passed((1,)))


@given(st.lists(st.integers(0, K), min_size=1, max_size=50))
def test_acceptance_follows_from_the_accepted_tokens_of_every_draft(lengths: list[int]) -> None:
    counters = SpecCounters(
        len(lengths),
        K * len(lengths),
        sum(lengths),
        tuple(sum(length > place for length in lengths) for place in range(K)),
    )
    length, rate, per_position = acceptance(counters, K)
    assert length == pytest.approx(1 + sum(lengths) / len(lengths))
    assert length == pytest.approx(1 + sum(per_position))
    assert rate == pytest.approx((length - 1) / K)
    assert all(earlier >= later for earlier, later in zip(per_position, per_position[1:], strict=False))


def test_positions_are_padded_to_k() -> None:
    assert acceptance(SpecCounters(2, 4, 3, (2, 1)), 4) == (2.5, 0.75, (1.0, 0.5, 0.0, 0.0))
    assert acceptance(SpecCounters(0, 0, 0, ()), 0) == (1.0, 0.0, ())


def test_counters_subtract() -> None:
    assert SpecCounters(9, 36, 20, (8, 7)) - SpecCounters(4, 16, 9, (4, 3)) == SpecCounters(5, 20, 11, (4, 4))


class Watched:
    """Answers a prompt with its own ids, twice, and remembers in which order it was asked."""

    order: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, name: str, k: int | None) -> None:
        self.name, self.k, self.steps = name, k, 0

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling,
                 concurrency: int) -> list[Completion]:
        self.order.append((self.name, len(prompts)))
        time.sleep(0.01 * len(prompts))
        self.steps += len(prompts) if self.k else 0
        return [Completion((*prompt, *prompt), "stop") for prompt in prompts]

    def counters(self) -> SpecCounters:
        return SpecCounters(self.steps, self.steps, self.steps, (self.steps,) if self.k else ())


def test_servers_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers every prompt once, in the order of the prompts, and what came before is not counted."""
    monkeypatch.setattr("trainer.evaluate.serving.IDLE_SECONDS", 0.0)
    Watched.order.clear()
    prompts = [[number] for number in range(7)]
    plain, drafted = measure([Watched("plain", None), Watched("drafted", 1)], prompts,
                             Sampling(2, 0.0, 1.0, 0), users=1, warmup=2, rounds=3)
    assert Watched.order[:2] == [("plain", 2), ("drafted", 2)], "the warm-up"
    assert Watched.order[2:] == [("plain", 2), ("drafted", 2), ("drafted", 2), ("plain", 2), ("plain", 3),
                                 ("drafted", 3)]
    for found in (plain, drafted):
        assert [output.tokens for output in found.outputs] == [(number, number) for number in range(7)]
        assert found.output_tokens == 14 and found.tok_s == pytest.approx(14 / found.seconds)
        assert 0.07 <= found.seconds < 1
    assert plain.counters.drafts == 0 and drafted.counters.drafts == 7
    assert compare(plain, drafted).lossless


def test_more_turns_than_prompts() -> None:
    Watched.order.clear()
    measure([Watched("plain", None)], [[1], [2]], Sampling(2, 0.0, 1.0, 0), users=1, warmup=0, rounds=5)
    assert Watched.order == [("plain", 1), ("plain", 1)]


@pytest.fixture(scope="module")
def circling_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers add nothing, so its next token depends on the last one alone: greedy text soon
    runs in a circle, and what stood there before is the right draft."""
    folder = RandomLlama(
        hidden_size=64,
        layers=1,
        heads=2,
        key_value_heads=1,
        intermediate_size=64,
        vocab_size=512,
        tied=False,
        seed=5,
        scale=0.2,
        runtime=Kept(str(tmp_path_factory.mktemp("cache"))),
    ).folder()
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Start:
    """What `enter` needs of a server: it comes up at once, fails, or takes as long as it is waited for."""

    def __init__(self, kind: str) -> None:
        self.kind, self.abandoned, self.up = kind, False, False

    def __enter__(self) -> None:
        if self.kind == "fails":
            raise UserError("no room")
        while self.kind == "takes long" and not self.abandoned:
            time.sleep(0.01)
        self.up = True


@pytest.mark.parametrize("kinds", [("fails", "takes long"), ("takes long", "fails")])
def test_servers_that_start_together_are_given_up_together(kinds: tuple[str, str]) -> None:
    servers = [Start(kind) for kind in kinds]
    began = time.monotonic()
    with pytest.raises(UserError, match="no room"):
        enter(servers)
    assert all(server.abandoned for server in servers) and time.monotonic() - began < 60


def test_servers_start_together() -> None:
    servers = [Start("comes up"), Start("comes up")]
    enter(servers)
    assert [server.up for server in servers] == [True, True] and not servers[0].abandoned


@pytest.fixture(scope="module")
def drafting(circling_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with small_server(python=vllm_python()).serve(circling_target, log, method="ngram", k=K) as server:
        yield server


@pytest.mark.vllm
def test_a_real_server_is_measured(drafting: RunningServer) -> None:
    prompts = [[10, 20, 30], [40, 50, 60, 70], [80]]
    sampling = Sampling(max_new_tokens=100, temperature=0.0, top_p=1.0, seed=0)
    [cold] = measure([drafting], prompts, sampling, users=2, warmup=0, rounds=1)
    [warm] = measure([drafting], prompts, sampling, users=2, warmup=2, rounds=2)
    assert cold.output_tokens == sum(len(output.tokens) for output in cold.outputs)
    assert cold.tok_s == pytest.approx(cold.output_tokens / cold.seconds)
    assert [output.tokens for output in cold.outputs] == [output.tokens for output in warm.outputs]
    # batching may move a draft; counting the warm-up too would add about two thirds
    assert abs(warm.counters.drafts - cold.counters.drafts) <= 0.1 * cold.counters.drafts
    assert 0 < warm.counters.drafts < warm.output_tokens
    assert warm.counters.draft_tokens <= K * warm.counters.drafts
    assert len(warm.per_position) == K
    assert 2 < warm.mean_accepted_length <= K + 1
    assert warm.mean_accepted_length == pytest.approx(1 + sum(warm.per_position))
    # a step without a draft gives one token, a step with one its accepted tokens and one more
    assert warm.counters.accepted + warm.counters.drafts <= warm.output_tokens


@pytest.mark.vllm
def test_a_server_killed_in_the_middle(drafting: RunningServer) -> None:
    """The last test with the shared server. Its front end, the child of the watcher, is killed."""
    watcher = drafting.process.pid
    front = int(Path(f"/proc/{watcher}/task/{watcher}/children").read_text())

    def kill(index: int, answer: Completion) -> None:
        os.kill(front, signal.SIGKILL)

    with pytest.raises(UserError, match=r"vLLM server ended with signal SIGKILL.*vllm\.log"):
        drafting.complete([[10, 20, 30]] * 100, Sampling(100, 0.0, 1.0, 0), 2, progress=kill)
    assert vllm_process.members(watcher) == [], "the engine ended with its front end"
