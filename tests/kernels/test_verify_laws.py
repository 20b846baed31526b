"""What verification emits has the target's law, whatever was drafted: by many draws of small targets, with
tests that are seen to tell verification that is nearly right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from laws import chain_law, distance, fit, law, settings
from steps import Chain, Implementation, cells, joined, sampling
from torch import Tensor

from trainer.kernels import verify_cpu
from trainer.kernels.verification import Sampling, Verification

FEW, MILLION = 6000, 1_000_000
DRAWS = pytest.mark.parametrize("draws", [FEW, pytest.param(MILLION, marks=pytest.mark.slow)])
KINDS = {"one-hot": {"one_hot": True}, "full": {}, "reduced": {"ids": torch.tensor([6, 1, 0, 4, 3])}}
WAYS = [{"temperature": 1}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.15}]
FITS, WRONG = 1e-4, 1e-6


def split(implementation: Implementation, draws: int, parts: int) -> list[int]:
    """The draws in portions that memory holds."""
    return [min(100_000, int(draws * implementation.draws) // parts)] * math.ceil(
        draws * implementation.draws / parts / 100_000)


@DRAWS
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_texts_have_the_target_s_law(implementation: Implementation, kind: str, block: bool, draws: int
                                           ) -> None:
    chain, found = Chain.random(8, **KINDS[kind]), []
    for portion, size in enumerate(split(implementation, draws, 1)):
        how = joined([sampling(size, **way, seed=portion) for way in WAYS])
        texts = chain.generate(implementation.verify, how, 3, 2, block, seed=portion)
        found.append(texts.unflatten(0, (3, -1)))
    for way, texts in zip(WAYS, torch.cat(found, 1), strict=True):
        rows = [law(row, **way) for row in chain.target]
        assert fit(cells(texts, 8), chain_law(rows, 0, 3)) > FITS, way


@DRAWS
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("kind", ["one-hot", "full"])
def test_a_token_is_as_near_its_law_as_draws_are(implementation: Implementation, kind: str, block: bool,
                                                 draws: int) -> None:
    chain, found = Chain.random(64, 1, **KINDS[kind]), []
    for portion, size in enumerate(split(implementation, 3 * draws, 1)):
        how = sampling(size, seed=portion)
        found.append(chain.generate(implementation.verify, how, 1, 3, block, seed=portion))
    tokens, chances = torch.cat(found)[:, 0], torch.tensor(law(chain.target[0], 1)).double()
    assert fit(tokens, chances) > FITS
    assert distance(tokens, chances) < 2 * math.sqrt(64 / (2 * math.pi * len(tokens)))


def test_acceptance_and_both_kinds_of_emission_have_their_laws(implementation: Implementation) -> None:
    chain, size = Chain.random(8, 2), int(30_000 * implementation.draws)
    how, start = sampling(size), torch.zeros(size, dtype=torch.int64)
    step = chain.step(start, how, 2, torch.Generator().manual_seed(5))
    done, drafts = implementation.verify(step), step.drafts.view(-1, 3)
    p, q = torch.tensor(law(chain.target[0], 1)), torch.tensor(law(chain.drafter[0], chain.temperature))
    chance = float(torch.minimum(p, q).sum())
    accepted = done.counts > 1
    spread = math.sqrt(chance * (1 - chance) / size)
    assert abs(float(accepted.double().mean()) - chance) < 4 * spread
    residual = (p - q).clamp(min=0)
    assert fit(done.tokens[~accepted, 0], residual.double() / residual.sum()) > FITS
    whole = done.counts == 3
    last = drafts[whole, 1].mode().values
    behind = done.tokens[whole & (drafts[:, 1] == last), 2]
    assert fit(behind, torch.tensor(law(chain.target[last], 1)).double()) > FITS


@DRAWS
def test_every_filter_keeps_what_vllm_s_keeps(implementation: Implementation, draws: int) -> None:
    """Logits with many ties, at the k-th and at the edge of top-p, too."""
    ways = [{"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            for temperature in (0.3, 0.7, 1, 1.5) for top_k in (0, 1, 20) for top_p in (0.8, 0.95, 1)
            for min_p in (0, 0.05)]
    size = max(10, int(min(4 * draws, MILLION) * implementation.draws) // len(ways))
    target = (torch.randn(1, 150, generator=torch.Generator().manual_seed(6)) * 2).round() / 2
    how = joined([sampling(size, **way) for way in ways])
    rows = target.expand(2 * size * len(ways), -1)
    drafts = torch.full((len(rows),), -1)
    drafts[::2] = torch.arange(len(how.seed)) % 150
    starts = torch.arange(0, len(rows) + 1, 2).int()
    done = implementation.verify(Verification(rows, starts, drafts, how, 150))
    for index, tokens in enumerate(done.tokens[:, 0].view(-1, size)):
        chances = torch.tensor(law(target[0], *settings(how, index * size))).double()
        assert fit(tokens, chances) > FITS / len(ways), ways[index]


def truncated(step: Verification, stop: Tensor) -> Verification:
    """The step without each request's drafts from the first that is to stop on, [N, k] bool."""
    k = stop.shape[1]
    kept = (~stop).long().cumprod(1).sum(1)
    place = torch.arange(k + 1)
    rows = (place <= kept[:, None]).flatten()
    drafts = step.drafts.view(-1, k + 1).masked_fill(place == kept[:, None], -1).flatten()[rows]
    drawn = step.distribution and replace(step.distribution, **{
        name: getattr(step.distribution, name)[rows] for name in ("logits", "lse", "drawn_logit")})
    starts = torch.cat([kept[:1] * 0, (kept + 1).cumsum(0)]).int()
    return replace(step, target_logits=step.target_logits[rows], starts=starts, drafts=drafts,
                   distribution=drawn)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("kind", ["one-hot", "full"])
def test_drafts_may_end_where_nothing_of_the_token_itself_decides(implementation: Implementation, kind: str,
                                                                  block: bool) -> None:
    chain = Chain.random(8, 3, **KINDS[kind])

    def changed(step: Verification) -> Verification:
        said = step.target_logits.argmax(1).view(-1, 4)[:, :3]  # by the token before
        return truncated(step, said % 3 == 0)

    how = sampling(int(FEW * implementation.draws))
    texts = chain.generate(implementation.verify, how, 3, 3, block, changed)
    assert fit(cells(texts, 8), chain_law([law(row, 1) for row in chain.target], 0, 3)) > FITS


TWO = Chain(torch.tensor([0.7, 0.3]).log().repeat(2, 1), torch.tensor([0.5, 0.5]).log().repeat(2, 1), 1.0)


def test_drafts_that_end_by_the_token_itself_are_told(implementation: Implementation) -> None:
    """The counter-example of DSpark's paper: 0.85 and 0.15 in place of 0.7 and 0.3."""
    texts = TWO.generate(implementation.verify, sampling(int(40_000 * implementation.draws)), 1, 1,
                         changed=lambda step: truncated(step, step.drafts.view(-1, 2)[:, :1] == 1))
    assert fit(texts[:, 0], torch.tensor([0.7, 0.3]).double()) < WRONG
    assert fit(texts[:, 0], torch.tensor([0.85, 0.15]).double()) > FITS


def told(chain: Chain, block: bool = False, **changed: object) -> float:
    """How well the CPU's texts of three tokens fit."""
    texts = chain.generate(verify_cpu.verify, sampling(4 * FEW), 3, 3, block, **changed)
    rows = [law(row, 1) for row in chain.target]
    return fit(cells(texts, len(rows)), chain_law(rows, 0, 3))


@pytest.mark.parametrize("block", [False, True])
def test_a_wrong_temperature_of_the_drafts_is_told(block: bool) -> None:
    def changed(step: Verification) -> Verification:
        drawn, low = step.distribution, step.distribution.temperature * 0.6
        return replace(step, distribution=replace(drawn, temperature=low,
                                                  lse=(drawn.logits / low[0]).logsumexp(1)))

    assert told(Chain.random(4, 4), block) > FITS
    assert told(Chain.random(4, 4), block, changed=changed) < WRONG


@pytest.mark.parametrize("kind", ["one-hot", "full"])
def test_one_number_for_acceptance_and_emission_is_told(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(verify_cpu, "EMIT", verify_cpu.ACCEPT)
    assert told(Chain.random(4, 4, **KINDS[kind])) < WRONG


def test_a_residual_that_does_not_sum_to_1_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = verify_cpu._of_weights
    monkeypatch.setattr(verify_cpu, "_of_weights", lambda weights, number: normal(
        weights, (number / weights.sum((1, 2))).clamp(max=1 - 1e-9)))
    assert told(Chain.random(4, 4)) < WRONG


def test_numbers_that_two_blocks_share_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's decision looks at positions that it does not emit, and that the next block looks at again."""
    normal = verify_cpu._Draws.numbers
    even = Chain(torch.zeros(2, 2), torch.tensor([[1.0, 0], [1, 0]]), one_hot=True)
    assert told(even, True) > FITS
    monkeypatch.setattr(verify_cpu._Draws, "numbers",
                        lambda self, rows, stream, turn=None: normal(self, rows, stream))
    assert told(even, True) < WRONG


def test_the_numbers_of_a_request_are_its_own(implementation: Implementation) -> None:
    """Other seeds and other positions give other tokens, the same ones the same."""
    logits, same = torch.zeros(60, 1000), torch.zeros(60, dtype=torch.int64)
    how, places = sampling(60), torch.arange(60)

    def tokens(how: Sampling) -> Tensor:
        return implementation.verify(Verification(
            logits, torch.arange(61).int(), torch.full((60,), -1), how, 1000)).tokens[:, 0]

    assert len(tokens(how).unique()) > 40
    assert len(tokens(replace(how, seed=same, position=places)).unique()) > 40
    assert len(tokens(replace(how, seed=same)).unique()) == 1
