"""The Triton kernels' own ways: random numbers, filters of wide rows, workspaces, launches, bytes, and what
is refused. Triton's interpreter runs them; a device does where one is (`-m gpu`). """

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import INTERPRETER
from steps import sampling, uneven

from trainer.errors import UserError
from trainer.kernels import select, verify_reference
from trainer.kernels.philox import ACCEPT, EMIT, uniform
from trainer.kernels.verification import DraftDistribution, Sampling, Verification, Verified

VOCABULARY = 151_936  # of Qwen3: bytes are counted in units of one of these
KINDS = {
    "greedy": {"temperature": 0.0}, "one-hot": {}, "filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "top-p": {"top_p": 0.95}, "block": {"block": True}, "full": {"full": True},
    "full block": {"full": True, "block": True},
    "full block filters": {"full": True, "block": True, "top_k": 50, "top_p": 0.9},
}


def same(found: Verified, expected: Verified) -> bool:
    return torch.equal(found.tokens, expected.tokens) and torch.equal(found.counts, expected.counts)


def test_numbers_are_those_of_philox() -> None:
    generator = torch.Generator().manual_seed(0)
    position = torch.randint(-2 ** 62, 2 ** 62, (64,), generator=generator)
    turn = torch.randint(100, (64,), generator=generator)
    for seed, stream in ((5, ACCEPT), (-2 ** 60 + 7, EMIT), (2 ** 62 + 2 ** 31, EMIT)):
        found = INTERPRETER.ask("uniform", seed, position, stream, turn)
        assert torch.equal(found, uniform(torch.full_like(position, seed), position, stream, turn))


def test_keys_rise_with_numbers_and_tell_them() -> None:
    small = torch.finfo(torch.float32).tiny
    values = torch.tensor([-torch.inf, -3e38, -1.5, -1, -small, -small / 8, 0, small / 8, small, 1, 3e38,
                           torch.inf])
    keys, back = INTERPRETER.ask("keys", torch.cat([values, torch.tensor([-0.0] * 4)]))
    assert (keys[:12].diff() > 0).all() and torch.equal(back[:12], values)
    assert (keys[12:] == keys[6]).all()


def wide(seed: int, vocabulary: int, requests: int) -> Verification:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2 * requests, vocabulary, generator=generator) * 3
    drafts = torch.full((2 * requests,), -1)
    drafts[::2] = logits[::2].argmax(1)
    starts = torch.arange(0, 2 * requests + 1, 2).int()
    return Verification(logits, starts, drafts, sampling(requests), vocabulary)


@pytest.mark.parametrize(("spread", "rounded"), [(0.5, True)] + [
    pytest.param(spread, rounded, marks=pytest.mark.slow)
    for spread, rounded in ((0.01, False), (0.01, True), (0.5, False), (3, False), (3, True))])
def test_filters_that_keep_more_than_the_list_holds(spread: float, rounded: bool) -> None:
    """Up to 1500 tokens, and the list holds 1024: many equal ones, too, that only their ids tell apart."""
    ways = [{"top_k": 1200}, {"top_k": 1499}, {"top_p": 0.7}, {"top_p": 0.01}, {"top_p": 0.0}, {"min_p": 0.3},
            {"top_k": 1300, "top_p": 0.6}, {"min_p": 0.01, "top_p": 0.5},
            {"top_k": 40, "min_p": 0.02, "top_p": 0.9}]
    how = [sampling(1, 0.8, seed=index, **way) for index, way in enumerate(ways)]
    how = Sampling(**{name: torch.cat([getattr(each, name) for each in how])
                      for name in Sampling.__dataclass_fields__})
    logits = torch.randn(len(ways), 1500, generator=torch.Generator().manual_seed(7)) * spread
    logits = logits.round() if rounded else logits
    step = Verification(logits, torch.arange(len(ways) + 1).int(), torch.full((len(ways),), -1), how, 1500)
    assert same(INTERPRETER.verify(step), verify_reference.verify(step))


SHARED = [(True, False, 1), (True, True, 3), (False, False, 50)]


@pytest.mark.parametrize(("one_hot", "block", "programs"), [(False, True, 2)] + [
    pytest.param(*each, marks=pytest.mark.slow) for each in SHARED])
def test_one_workspace_and_any_number_of_programs_change_nothing(one_hot: bool, block: bool, programs: int
                                                                  ) -> None:
    steps = [uneven(seed, block, one_hot, vocabulary=2500) for seed in (3, 1)]
    found = INTERPRETER.ask("verify_several", steps, 6, 5, programs)
    for step, done in zip(steps, found, strict=True):
        expected = verify_reference.verify(step)
        width = expected.tokens.shape[1]
        assert same(Verified(done.tokens[:, :width], done.counts), expected)
        assert (done.tokens[:, width:] == -1).all()


@pytest.mark.parametrize("programs", [1, 3])
def test_greedy_requests_need_not_say_that_all_are(programs: int) -> None:
    step = uneven(5, vocabulary=2500)
    step = replace(step, sampling=replace(step.sampling, temperature=torch.zeros(6)))
    expected = verify_reference.verify(step)
    for asked in ({"sampled": False}, {"filters": False}, {}):
        found, = INTERPRETER.ask("verify_several", [step], 6, 5, programs, **asked)
        assert same(Verified(found.tokens[:, :expected.tokens.shape[1]], found.counts), expected)


def test_requests_without_rows_and_rows_beyond_the_longest_are_left() -> None:
    """What a graph that was captured for more requests is given."""
    step = wide(1, 500, 2)
    padded = replace(step, starts=torch.tensor([0, 2, 4, 4]).int(), sampling=sampling(3))
    found, = INTERPRETER.ask("verify_several", [padded], 3, 2, None)
    expected = verify_reference.verify(step)
    assert same(Verified(found.tokens[:2], found.counts[:2]), expected)
    assert found.counts[2] == 0 and (found.tokens[2] == -1).all()
    certain = torch.full((4, 500), -torch.inf)
    certain[:, 9] = 0
    long = Verification(certain, torch.tensor([0, 3, 4]).int(), torch.full((4,), 9), sampling(2), 500)
    for asked in ({}, {"sampled": False}):
        found, = INTERPRETER.ask("verify_several", [long], 2, 2, None, **asked)
        assert found.counts.tolist() == [2, 1] and found.tokens.tolist() == [[9, 9], [9, -1]]


def like_a_model(vocabulary: int, temperature: float = 0.7, top_k: int = 0, top_p: float = 1,
                 min_p: float = 0, full: bool = False, block: bool = False) -> Verification:
    """Two requests of 8 rows, most of whose mass is on some hundred tokens of VOCABULARY, and on as many in
    proportion of another; the first one's drafts are all accepted, of the second one none is."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, vocabulary, generator=generator)
    count, top_k = 300 * vocabulary // VOCABULARY, -(-top_k * vocabulary // VOCABULARY)
    likely = torch.rand(logits.shape, generator=generator).topk(count).indices
    logits.scatter_(1, likely, torch.linspace(14, 4, count).expand(16, -1))
    drafts = likely[:, 0].clone()
    logits[:8].scatter_(1, drafts[:8, None], 60.0)
    drafts[8] = likely[8, -1]
    drafts[7::8] = -1
    drawn = None
    if full:
        drafter = logits.scatter(1, drafts.clamp(min=0)[:, None], 70.0).bfloat16()
        scaled = drafter.float() / temperature
        drawn = DraftDistribution(drafter, torch.full((2,), temperature), scaled.logsumexp(1),
                                  drafter.float().gather(1, drafts.clamp(min=0)[:, None])[:, 0])
    how, starts = sampling(2, temperature, top_k, top_p, min_p), torch.tensor([0, 8, 16]).int()
    return Verification(logits.bfloat16(), starts, drafts, how, vocabulary, drawn, block)


def needed(kind: str) -> int:
    """Vocabularies of bytes that the two requests take if logits alone are counted: each row of the target
    once, and of drafts that were drawn from something one row of each for the one rejected, or, verified as a
    block, for all 14 that are drafted. What a filter cuts off is not read again, so that it may be fewer."""
    return 2 * 16 + {"full": 4, "full block": 14 * 4, "full block filters": 14 * 4}.get(kind, 0)


QUICK = [pytest.param(kind, VOCABULARY // 8, marks=[] if kind in ("greedy", "one-hot", "filters", "full")
                      else pytest.mark.slow) for kind in KINDS]
WHOLE = [pytest.param(kind, VOCABULARY, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(("kind", "vocabulary"), QUICK + WHOLE)
def test_launches_and_bytes(kind: str, vocabulary: int) -> None:
    step = like_a_model(vocabulary, **KINDS[kind])
    greedy = kind == "greedy"
    launches, loads, stores, done = INTERPRETER.ask("traffic", step, 8, None, sampled=not greedy)
    assert done.counts.tolist() == [8, 1]
    assert launches == (2 if greedy else 3)
    moved = sum(loads.values()) + sum(stores.values())
    print(f"{kind}: {moved / vocabulary:.2f} V of {needed(kind)} V, loads {loads}, stores {stores}")
    assert moved <= 1.1 * needed(kind) * vocabulary
    assert sum(stores.values()) < 0.05 * 2 * 16 * vocabulary
    if greedy:
        assert loads["logits"] == 2 * 16 * vocabulary  # once
    if kind == "one-hot":  # and of either request two blocks that are drawn from, at most
        assert loads["logits"] < 2 * 16 * vocabulary + 2 * 2 * 2 * 1024 + 64


def test_what_does_not_fit_a_workspace_is_said() -> None:
    from trainer.kernels.verify_triton import Verifier

    step, cpu = wide(1, 50, 2), torch.device("cpu")
    for made, said in (((1, 2, 50, torch.float32), "has 2 requests; the workspace is for 1"),
                       ((2, 2, 60, torch.float32), "vocab_size is 50; the workspace is for 60"),
                       ((2, 2, 50, torch.bfloat16), "type is torch.float32; the workspace is for torch.bf")):
        with pytest.raises(ValueError, match=said):
            Verifier(*made, cpu).launches(step)
    with pytest.raises(ValueError, match="the logits are on cpu"):
        Verifier(2, 2, 50, torch.float32, cpu)(step)


def test_an_unavailable_kernel_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="verify=triton cannot run here: no CUDA or ROCm device"):
        select.verify("triton")
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="verify=triton needs the package triton, which is not installed"):
        select.verify("triton")


def test_nothing_else_needs_triton() -> None:
    kernels = Path(select.__file__).parent
    names = [f"trainer.kernels.{file.stem}" for file in kernels.glob("*.py") if "triton" not in file.stem]
    code = f"import sys; sys.modules['triton'] = None; import {', '.join(sorted(names))}"
    assert len(names) > 5
    subprocess.run([sys.executable, "-c", code], check=True, cwd=kernels.parents[1])


@pytest.mark.gpu
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_device_gives_what_the_reference_gives_in_a_graph_too(one_hot: bool, block: bool) -> None:
    from trainer.kernels.verify_triton import Verifier, verify

    def moved(record: object) -> object:
        return type(record)(**{name: value.cuda() if isinstance(value, torch.Tensor) else
                               moved(value) if hasattr(value, "__dataclass_fields__") else value
                               for name, value in vars(record).items()})

    for seed in range(40):
        step = uneven(seed, block, one_hot, [torch.bfloat16, torch.float16, torch.float32][seed % 3])
        expected, there = verify_reference.verify(step), moved(step)
        found = verify(there)
        assert same(Verified(found.tokens.cpu(), found.counts.cpu()), expected), seed
        verifier = Verifier(6, expected.tokens.shape[1], 1500, step.target_logits.dtype,
                            there.target_logits.device)
        verifier(there)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = verifier(there)
        captured.tokens.zero_()
        graph.replay()
        assert same(Verified(captured.tokens.cpu(), captured.counts.cpu()), expected), seed
