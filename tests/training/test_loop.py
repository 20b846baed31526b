"""The loop: one denominator for everything in a step, the schedule, clipping, and what it refuses to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny import dflash, placed, random_samples, states_of, uneven
from torch import Tensor, nn

from trainer.architectures.base import Drafter, Exported
from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.records import Batch, Ratio, Step
from trainer.target import Target
from trainer.training.loop import Pace, Taken, fit, means
from trainer.training.schedule import warmup_cosine

SGD = partial(torch.optim.SGD, lr=1.0)
STEADY = Pace(steps=1, accumulate=1, warmup=0.0, floor=1.0, clip=1e9, precision="float32")


class Given(Drafter):
    """A drafter of one weight whose rows have the loss that their `taps` say: weight * value for every
    supervised token."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.shape = shape

    def loss(self, batch: Batch) -> Step:
        count = batch.loss_mask.sum()
        total = self.shape(self.weight, batch.taps[batch.loss_mask, 0]).sum()
        return Step(total, count, {"accepted_length": Ratio(2 * count, count)})

    def new_context(self) -> Any: ...
    def extend(self, context: Any, tokens: Any, taps: Tensor) -> Any: ...
    def draft_logits(self, context: Any, anchor: int, length: int) -> Tensor: ...
    def propose(self, context: Any, anchor: int, length: int) -> list[int]: ...
    def export(self) -> Exported: ...
    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: Any) -> Given: ...
    @classmethod
    def longest_draft(cls, **settings: Any) -> int: ...


def row(supervised: int, value: float, tokens: int = 100) -> Batch:
    mask = torch.arange(tokens) < supervised
    return Batch(torch.zeros(tokens, dtype=torch.int64), mask, torch.zeros(tokens, dtype=torch.int64),
                 torch.arange(tokens), torch.full((tokens, 1), value), torch.zeros(tokens, 1), 0)


def run(drafter: Drafter, rows: list[Batch], pace: Pace, start: int = 0, lr: float = 1.0) -> list[Taken]:
    return list(fit(placed(drafter, partial(torch.optim.SGD, lr=lr)),
                    lambda number: rows[number % len(rows)], pace, start))


def test_a_step_of_two_rows_is_divided_once_by_all_its_tokens() -> None:
    """1 token of loss 4 and 99 of loss 1: their mean is 1.03, not the mean 2.5 of two means."""
    drafter = Given()
    [taken] = run(drafter, [row(1, 4.0), row(99, 1.0)], replace(STEADY, accumulate=2))
    assert means(taken.totals) == pytest.approx({"loss": 1.03, "accepted_length": 2.0})
    assert taken.grad_norm == pytest.approx(1.03)
    assert float(drafter.weight.detach()) == pytest.approx(1 - 1.03)
    assert taken.tokens == 200


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_two_rows_of_a_step_have_the_gradient_of_one_row_with_all_samples(tiny_target: Target,
                                                                          objective: str) -> None:
    samples = random_samples((30, 12, 41, 25))
    states = states_of(tiny_target, samples, [1, 2])
    parts = [collate(samples[:1], states[:1], 1, "cpu", 90), collate(samples[1:], states[1:], 2, "cpu", 90)]
    steps = []
    for rows in (parts, [collate(samples, states, 3, "cpu", 180)]):
        drafter = uneven(dflash(tiny_target, anchors=120, objective=objective))
        before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
        [taken] = run(drafter, rows, replace(STEADY, accumulate=len(rows)))
        steps.append((taken,
                      {name: before[name] - value.detach() for name, value in drafter.named_parameters()}))
    (one, first), (two, second) = steps
    assert means(one.totals) == pytest.approx(means(two.totals), rel=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6) and one.tokens == two.tokens == 108
    difference = math.sqrt(sum(float((first[name] - second[name]).pow(2).sum()) for name in first))
    assert difference < 1e-6 * one.grad_norm


def test_a_row_without_supervision_counts_nothing() -> None:
    drafter = Given()
    [taken] = run(drafter, [row(0, 5.0), row(2, 3.0)], replace(STEADY, accumulate=2))
    assert means(taken.totals)["loss"] == 3.0 and float(drafter.weight.detach()) == -2.0
    empty = Given()
    [taken] = run(empty, [row(0, 5.0)], STEADY)
    assert means(taken.totals) == {} and float(empty.weight.detach()) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_step(value: float) -> None:
    drafter, rows = Given(), [row(2, 0.25), row(2, 0.25), row(2, value)]
    taken = []
    with pytest.raises(UserError,
                       match=r"the loss \((nan|inf)\) .* is not finite at step 3; lower optimizer.lr"):
        for each in fit(placed(drafter, SGD), rows.__getitem__, replace(STEADY, steps=3), 0):
            taken.append(each.step)
    assert taken == [1, 2] and float(drafter.weight.detach()) == 0.5


def test_a_gradient_that_is_not_finite_stops_before_the_step() -> None:
    drafter = Given(lambda weight, values: (weight - 1).abs().sqrt() * values)
    with pytest.raises(UserError,
                       match=r"the loss \(0\) or its gradient \((nan|inf)\) is not finite at step 1"):
        run(drafter, [row(2, 1.0)], STEADY)
    assert float(drafter.weight.detach()) == 1.0


@pytest.mark.parametrize(("shape", "said"), [
    (torch.mul, r"1 tensors \(weight\) are not finite after the last step; lower optimizer.lr"),
    (lambda weight, values: weight.pow(2) * values, r"the loss \(inf\) is not finite after the last step")])
def test_a_last_step_that_was_too_large_is_told(shape: Callable[[Tensor, Tensor], Tensor], said: str) -> None:
    """There is no next step that would stop; the one before says nothing."""
    rate = 1e30 if shape is torch.mul else 1e25
    taken = run(Given(shape), [row(2, 1e-30), row(2, 1e9 if shape is torch.mul else 1.0)],
                replace(STEADY, steps=2), lr=rate)
    assert taken[0].fault is None and re.match(said, taken[1].fault or "")


def test_the_gradient_is_clipped_as_a_whole_and_reported_as_it_was() -> None:
    drafter = Given()
    [taken] = run(drafter, [row(5, 8.0)], replace(STEADY, clip=0.5))
    assert taken.grad_norm == pytest.approx(8.0) and float(drafter.weight.detach()) == pytest.approx(0.5)


def test_the_rate_rises_and_falls_as_a_function_of_the_step() -> None:
    factors = [warmup_cosine(step, 100, 0.1, 0.2) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0 and factors[55] == pytest.approx(0.6)
    assert factors[99] == pytest.approx(0.2, abs=1e-3)
    assert all(earlier >= later for earlier, later in zip(factors[9:], factors[10:], strict=False))
    assert warmup_cosine(0, 1, 0.04, 0.1) == 1.0, "a run of one step learns"
    assert {warmup_cosine(step, 50, 0.0, 1.0) for step in range(50)} == {1.0}


def test_a_run_that_goes_on_has_the_same_rates(tiny_target: Target) -> None:
    pace = replace(STEADY, steps=20, warmup=0.2, floor=0.1)
    whole = [taken.lr for taken in run(Given(), [row(1, 0.0)], pace, lr=0.3)]
    assert whole == pytest.approx([0.3 * warmup_cosine(step, 20, 0.2, 0.1) for step in range(20)])
    alone = placed(Given(), partial(torch.optim.SGD, lr=0.3))
    later = [taken.lr for taken in fit(alone, lambda number: row(1, 0.0), pace, 13)]
    assert later == whole[13:] and alone.optimizer.param_groups[0]["lr"] == 0.3


def test_rows_are_asked_for_by_number() -> None:
    asked: list[int] = []

    def get(number: int) -> Batch:
        asked.append(number)
        return row(1, 0.0)

    list(fit(placed(Given(), SGD), get, replace(STEADY, steps=5, accumulate=3), 3))
    assert asked == list(range(9, 15))


def test_autocast_is_on_only_when_asked_for(tiny_target: Target) -> None:
    """Masters and their gradients are float32 either way; the loss differs by the rounding of bfloat16."""
    samples = random_samples((30, 25))
    batch = collate(samples, states_of(tiny_target, samples, [1, 2]), 1, "cpu")
    found = {}
    for precision in ("float32", "bfloat16"):
        drafter = uneven(dflash(tiny_target, anchors=60))
        [taken] = run(drafter, [batch], replace(STEADY, precision=precision), lr=0.1)
        assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
        found[precision] = means(taken.totals)["loss"]
    assert found["float32"] != found["bfloat16"] == pytest.approx(found["float32"], rel=0.05)
