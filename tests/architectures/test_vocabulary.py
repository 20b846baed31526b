"""The reduced draft vocabulary: chosen by counts alone, special tokens in it whatever was counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.architectures.vocabulary import Coverage, choose, coverage, curve, offsets
from trainer.records import Sample
from trainer.training.build import count_by_category, count_tokens

TOKENS = st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=20), min_size=1, max_size=8)


def samples_of(answers: list[list[int]]) -> list[Sample]:
    return [Sample(f"s{number}", (0, *answer), (False, *[True] * len(answer)), "abc"[number % 3])
            for number, answer in enumerate(answers)]


@given(TOKENS, st.integers(4, 30), st.sets(st.integers(0, 29), max_size=3), st.randoms())
def test_the_same_tokens_give_the_same_vocabulary_in_any_order(answers: list[list[int]], size: int,
                                                               forced: set[int],
                                                               order: random.Random) -> None:
    ids = choose(count_tokens(samples_of(answers), 30), size, tuple(forced))
    mixed = [order.sample(answer, len(answer)) for answer in order.sample(answers, len(answers))]
    assert torch.equal(ids, choose(count_tokens(samples_of(mixed), 30), size, tuple(sorted(forced))))
    assert len(ids) == size and forced <= set(ids.tolist()) and bool((ids.diff() > 0).all())


@given(TOKENS, st.integers(4, 30), st.sets(st.integers(0, 29), max_size=3))
def test_no_other_vocabulary_of_the_size_covers_more(answers: list[list[int]], size: int,
                                                     forced: set[int]) -> None:
    counts = count_tokens(samples_of(answers), 30)
    ids = choose(counts, size, tuple(forced))
    rest = sorted((int(counts[token]) for token in range(30) if token not in forced), reverse=True)
    best = sum(int(counts[token]) for token in forced) + sum(rest[:size - len(forced)])
    assert coverage(counts, ids) == pytest.approx(best / int(counts.sum()))


def test_ties_and_unseen_tokens_go_to_the_lowest_ids() -> None:
    counts = torch.tensor([0, 5, 0, 5, 5, 0])
    assert choose(counts, 2, ()).tolist() == [1, 3]
    assert choose(counts, 4, (5,)).tolist() == [1, 3, 4, 5]
    assert choose(counts, 5, (5,)).tolist() == [0, 1, 3, 4, 5]
    assert offsets(torch.tensor([1, 3, 4])).tolist() == [1, 2, 2]
    assert curve(counts, [2, 4, 6], (5,)) == pytest.approx({2: 1 / 3, 4: 1.0}), "a row is the special token's"


@given(TOKENS)
def test_categories_are_parts_of_all(answers: list[list[int]]) -> None:
    samples = samples_of(answers)
    parts = count_by_category(samples, 30)
    assert torch.equal(sum(parts.values(), torch.zeros(30, dtype=torch.int64)), count_tokens(samples, 30))
    assert list(parts) == sorted({sample.category for sample in samples})


def test_categories_are_told_the_worst_first() -> None:
    found = Coverage(100, 320, 0.97, 150, 2, {}, {"chat": 0.99, "code": 0.9512})
    [_, told] = found.sentences()
    assert told == "draft vocabulary by category: code 95.12%, chat 99.00%"
    assert len([*replace(found, by_category={"chat": 0.97}).sentences()]) == 1, "one says nothing more"
