"""Packed rows: every sample once an epoch, nothing over the limit, an order that follows seed and epoch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.packing import collate, dealt, padding, plan_epoch, require_fit, seed_of
from trainer.errors import UserError
from trainer.records import HiddenStates, Sample

lengths = st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=60)


@settings(max_examples=120, deadline=None)
@given(lengths, st.integers(40, 90), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once_and_no_row_is_over_the_limit(given_lengths: list[int], tokens: int,
                                                                       seed: int, epoch: int) -> None:
    rows = plan_epoch(given_lengths, tokens, seed, epoch)
    assert sorted(index for row in rows for index in row) == list(range(len(given_lengths)))
    assert all(sum(given_lengths[index] for index in row) <= tokens for row in rows)
    assert rows == plan_epoch(given_lengths, tokens, seed, epoch)


def test_rows_are_well_filled() -> None:
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(10, 400, (500,), generator=generator).tolist()
    rows = plan_epoch(many, 1024, seed=3, epoch=0)
    assert sum(many) / (1024 * len(rows)) > 0.93


def test_padding_is_what_no_sample_fills() -> None:
    assert padding([[0, 1], [2]], [3, 5, 4], 10) == pytest.approx(8 / 20)
    assert padding([[0]], [7], 7) == 0 and padding([], [], 7) == 0


@given(st.lists(st.integers(0, 500), min_size=1, max_size=24), st.integers(1, 6))
def test_a_step_is_dealt_alike_and_evenly(loads: list[int], shares: int) -> None:
    loads = loads[:len(loads) // shares * shares] or [1] * shares
    found = dealt(loads, shares)
    assert sorted(number for share in found for number in share) == list(range(len(loads)))
    assert {len(share) for share in found} == {len(loads) // shares}
    assert all(share == sorted(share) for share in found) and found == dealt(list(loads), shares)
    sums = [sum(loads[number] for number in share) for share in found]
    assert max(sums) - min(sums) <= max(loads), "nobody is ahead by more than a row"


def test_rows_of_a_step_are_dealt_by_their_tokens() -> None:
    assert dealt([100, 90, 10, 20], 2) == [[0, 2], [1, 3]]
    assert dealt([5, 5, 5, 5], 2) == [[0, 2], [1, 3]], "as in turns, where all are the same"
    assert dealt([1, 2, 3], 1) == [[0, 1, 2]] and dealt([1, 2, 3], 3) == [[2], [1], [0]]


def test_the_order_follows_seed_and_epoch() -> None:
    many = [5] * 30
    orders = [plan_epoch(many, 10, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(orders[one] != orders[two] for one in range(4) for two in range(one))


def test_a_sample_longer_than_a_row_is_refused() -> None:
    samples = [Sample(f"s{length}", (1,) * length, (True,) * length) for length in (3, 41, 40)]
    with pytest.raises(UserError, match="sample s41 has 41 tokens but train.tokens=40.* train.tokens=41 or"):
        require_fit(samples, 40)
    require_fit(samples, 41)


def test_seeds_are_the_same_everywhere_and_all_different() -> None:
    assert seed_of(0, "row", 17) == 4343518134945458807
    found = Counter(seed_of(seed, "row", number) for seed in range(20) for number in range(200))
    assert max(found.values()) == 1 and all(0 <= each < 2 ** 62 for each in found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 7))
def test_a_row_holds_its_samples_one_after_the_other_and_padding_behind(sizes: list[int], extra: int) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    samples, states = [], []
    for number, size in enumerate(sizes):
        tokens = torch.randint(0, 99, (size,), generator=generator).tolist()
        samples.append(Sample(f"s{number}", tuple(tokens), tuple(index % 2 == 0 for index in range(size))))
        states.append(HiddenStates(torch.randn(size, 6, generator=generator).bfloat16(),
                                   torch.randn(size, 3, generator=generator).bfloat16()))
    batch = collate(samples, states, seed=7, device="cpu", tokens=sum(sizes) + extra)
    start = 0
    for number, (sample, state) in enumerate(zip(samples, states, strict=True)):
        rows = slice(start, start + len(sample.tokens))
        assert batch.tokens[rows].tolist() == list(sample.tokens)
        assert batch.loss_mask[rows].tolist() == list(sample.loss_mask)
        assert batch.document[rows].tolist() == [number] * len(sample.tokens)
        assert batch.position[rows].tolist() == list(range(len(sample.tokens)))
        assert torch.equal(batch.taps[rows], state.taps) and torch.equal(batch.last[rows], state.last)
        start += len(sample.tokens)
    assert len(batch.tokens) == len(batch.taps) == len(batch.last) == start + extra
    assert batch.document[start:].tolist() == [-1] * extra and not batch.loss_mask[start:].any()
    assert batch.loss_mask.dtype == torch.bool and batch.tokens.dtype == torch.int64 and batch.seed == 7
