"""What every implementation of verification does exactly: greedy, ragged and faulty requests, invariance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import Implementation, Verify, sampling, uneven
from torch import Tensor

from trainer.errors import UserError
from trainer.kernels import verify_reference
from trainer.kernels.select import require_verify
from trainer.kernels.select import verify as chosen
from trainer.kernels.verification import DraftDistribution, Sampling, Verification, Verified

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def step(logits: Tensor, lengths: list[int], drafts: list[int], how: Sampling, **changed: object
         ) -> Verification:
    made = {"starts": torch.tensor([0, *lengths]).cumsum(0).int(), "drafts": torch.tensor(drafts),
            "sampling": how, "vocab_size": logits.shape[1]}
    return Verification(logits, **made | changed)


def emitted(done: Verified) -> list[list[int]]:
    assert done.tokens.dtype == torch.int64 and done.counts.dtype == torch.int32
    place = torch.arange(done.tokens.shape[1])
    counts = torch.where(done.counts < 0, -1 - done.counts, done.counts)
    assert ((done.tokens >= 0) == (place < counts[:, None])).all()
    return [row[:count].tolist() for row, count in zip(done.tokens, counts, strict=True)]


def adversarial(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows that are easily misread, each with one finite number at least."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, size, generator=generator) * 4
    rows[1] = rows[1].round()  # ties
    rows[2] = -rows[2].abs() - 1
    rows[3] = -1.5
    rows[4, :] = 0
    rows[4, 0] = -0.0  # equals the others, and comes first
    rows[5] = -torch.inf
    rows[5, size // 2] = -3
    rows[6, ::2] = torch.nan
    rows[7, 1::2] = -torch.tensor(torch.nan)
    rows[7] = rows[7].clamp(max=-0.1)
    rows[8] = torch.finfo(dtype).max
    rows[8, 0] = -torch.finfo(dtype).max
    rows[9] = torch.rand(size, generator=generator) * torch.finfo(dtype).tiny
    rows[10, [size // 3, size - 1]] = 50
    rows[11] = -torch.rand(size, generator=generator) * torch.finfo(dtype).tiny
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 5, 1024, 1500, 2051])
def test_greedy_takes_the_lowest_of_the_most_likely(verify: Verify, size: int, dtype: torch.dtype) -> None:
    logits = torch.full((12, size + 29), 100, dtype=dtype)  # padding that nothing may see
    logits[:, :size] = adversarial(size, dtype, size)
    seen = logits[:, :size].float()
    best = seen.masked_fill(seen.isnan(), -torch.inf).argmax(1).tolist()
    how = sampling(12, temperature=0)
    made = step(logits, [1] * 12, [-1] * 12, how, vocab_size=size)
    assert emitted(verify(made)) == [[token] for token in best]
    right = [token if index % 4 != 3 else -1 for index, token in enumerate(best)]
    made = step(logits, [4] * 3, right, sampling(3, temperature=0), vocab_size=size)
    assert emitted(verify(made)) == [best[:4], best[4:8], best[8:]]
    wrong = [(token + 1) % size if index % 4 == 1 else token for index, token in enumerate(right)]
    made = step(logits, [4] * 3, wrong, sampling(3, temperature=0), vocab_size=size)
    assert emitted(verify(made)) == [best[:2], best[4:6], best[8:10]]


@pytest.mark.parametrize("rows", [2000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_greedy_never_differs_from_the_largest_number(twin: Implementation, rows: int) -> None:
    generator, done = torch.Generator().manual_seed(1), 0
    while done < max(2000, rows * twin.draws):
        logits = (torch.randn(min(rows, 20000), 96, generator=generator) * 8).round().bfloat16() - 20
        best = logits.float().argmax(1)
        drafts = torch.where(torch.rand(len(best), generator=generator) < 0.8, best, 5)
        drafts[3::4] = -1
        got = twin.verify(Verification(logits, torch.arange(0, len(best) + 1, 4).int(), drafts,
                                       sampling(len(best) // 4, temperature=0), 96))
        wrong = (drafts != best).view(-1, 4).long().argmax(1)
        assert torch.equal(got.counts, wrong.int() + 1)
        expected = best.view(-1, 4).masked_fill(torch.arange(4) > wrong[:, None], -1)
        assert torch.equal(got.tokens, expected)
        done += len(best)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("all_steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_step_gives_what_the_reference_gives(twin: Implementation, all_steps: bool, dtype: torch.dtype,
                                                 one_hot: bool, block: bool) -> None:
    for seed in range(10 if all_steps else twin.steps):
        vocabulary = [1500, 24, 1024, 2500][seed % 4]
        made = uneven(seed + 100 * one_hot + 1000 * block, block, one_hot, dtype, vocabulary)
        expected, found = verify_reference.verify(made), twin.verify(made)
        assert torch.equal(found.counts, expected.counts), seed
        assert torch.equal(found.tokens, expected.tokens), seed


def part(made: Verification, requests: list[int]) -> Verification:
    """Those requests alone, in that order, with rows that lie apart."""
    rows = torch.cat([torch.arange(made.starts[each], made.starts[each + 1]) for each in requests])
    wide = torch.full((len(rows), made.target_logits.shape[1] + 3), 7, dtype=made.target_logits.dtype)
    wide[:, :-3] = made.target_logits[rows]
    lengths = made.starts.diff()[requests]
    how = Sampling(**{name: getattr(made.sampling, name)[requests] for name in Sampling.__dataclass_fields__})
    drawn = made.distribution
    if drawn is not None:
        drawn = DraftDistribution(drawn.logits[rows], drawn.temperature[requests], drawn.lse[rows],
                                  drawn.drawn_logit[rows], drawn.token_ids, drawn.draft_ids)
    starts = torch.cat([lengths[:0], torch.zeros(1), lengths.cumsum(0)]).int()
    return replace(made, target_logits=wide[:, :-3], starts=starts, drafts=made.drafts[rows], sampling=how,
                   distribution=drawn)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_nothing_depends_on_the_batch_or_its_order(implementation: Implementation, one_hot: bool, block: bool
                                                   ) -> None:
    verify = implementation.verify
    for seed in (4, 5, 11):  # 5 or 6 requests
        made = uneven(seed, block, one_hot)
        whole, requests = verify(made), list(range(len(made.starts) - 1))
        for some in (requests[::-1], [requests[-1]], requests[1::2], [0] * 3):
            found = verify(part(made, some))
            assert torch.equal(found.counts, whole.counts[some])
            assert emitted(found) == emitted(Verified(whole.tokens[some], whole.counts[some]))


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("fault", [-torch.inf, torch.nan, torch.inf])
def test_a_row_without_a_finite_maximum_ends_its_request_and_is_told(
        verify: Verify, fault: float, temperature: float, block: bool) -> None:
    logits = torch.full((9, 40), -torch.inf)
    logits[:, 3] = 1  # the one token that there is
    for row in (1, 5):  # of the second request the row behind the first rejection
        logits[row] = fault if fault != torch.inf else logits[row]
        logits[row, 7] = fault
    made = step(logits, [3, 3, 3], [3, 3, -1, 2, 3, -1, 3, 3, -1], sampling(3, temperature), block=block)
    done = verify(made)
    sampled_block = block and temperature > 0
    if sampled_block:  # every row of a block is looked at
        assert done.counts.tolist() == [-1, -1, 3] and emitted(done) == [[], [], [3, 3, 3]]
    else:
        assert done.counts.tolist() == [-2, 1, 3] and emitted(done) == [[3], [3], [3, 3, 3]]
    with pytest.raises(ValueError, match="request 0 behind"):
        done.raise_faults()


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_end_at_a_placeholder_or_the_rows(verify: Verify, temperature: float, block: bool) -> None:
    logits = torch.full((8, 5), -torch.inf)
    logits[torch.arange(8), torch.tensor([1, 2, 3, 4, 0, 1, 2, 3])] = 0  # certain
    made = step(logits, [3, 1, 2, 2], [1, -1, 3, -1, 0, 1, 9, 3], sampling(4, temperature), block=block)
    assert emitted(verify(made)) == [[1, 2], [4], [0, 1], [2]]  # 9 is no token


def test_a_temperature_near_0_takes_the_most_likely(verify: Verify) -> None:
    logits = torch.randn(50, 1100, generator=torch.Generator().manual_seed(2))
    made = step(logits, [1] * 50, [-1] * 50, sampling(50, 1e-5))
    assert emitted(verify(made)) == [[token] for token in logits.argmax(1).tolist()]


@pytest.mark.parametrize("block", [False, True])
def test_a_draft_like_the_target_is_always_kept(verify: Verify, block: bool) -> None:
    """p = q on every row: nothing is left to draw from instead."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 30, generator=generator)
    drafts = torch.multinomial(logits.softmax(1), 1, generator=generator)
    drawn = DraftDistribution(logits, torch.ones(10), logits.logsumexp(1), logits.gather(1, drafts)[:, 0])
    drafts[3::4] = -1
    made = step(logits, [4] * 10, drafts[:, 0].tolist(), sampling(10), distribution=drawn, block=block)
    assert verify(made).counts.tolist() == [4] * 10


def test_kernels_are_chosen_by_name() -> None:
    with pytest.raises(UserError, match="^verify=fast is not known; choose reference, cpu or triton"):
        chosen("fast")


def test_a_kernel_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, device in (("reference", "cpu"), ("reference", "cuda"), ("cpu", "cpu")):
        require_verify(name, device)
    with pytest.raises(UserError, match="hardware.verify=cpu needs .* computes on cuda:1; set"):
        require_verify("cpu", "cuda:1")
    with pytest.raises(UserError, match="hardware.verify=triton needs .* computes on cpu; set"):
        require_verify("triton", "cpu")
    with pytest.raises(UserError, match="^hardware.verify=fast is not known"):
        require_verify("fast", "cpu")
    monkeypatch.setattr("trainer.kernels.select.find_spec", lambda name: None)
    with pytest.raises(UserError, match="^hardware.verify=triton needs the package triton, which"):
        require_verify("triton", "cuda")
