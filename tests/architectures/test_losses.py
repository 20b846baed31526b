"""Losses and position weights against sums written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.architectures import losses
from trainer.errors import UserError

TERMS = (losses.CrossEntropy, losses.ForwardKL, losses.TotalVariation, losses.NegativeLogAcceptance,
         losses.LK)


def drawn(seed: int, rows: int = 5, width: int = 7, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = (torch.randn(rows, width, generator=generator) * scale for _ in range(2))
    return logits, torch.randint(0, width, (rows,), generator=generator), teacher


def shares(row: Tensor) -> list[float]:
    wide = [math.exp(float(value)) for value in row.double()]
    return [value / sum(wide) for value in wide]


def written_out(name: str, row: Tensor, label: int, teacher: Tensor) -> float:
    q, p = shares(row), shares(teacher)
    alpha = sum(min(one, two) for one, two in zip(p, q, strict=True))
    kl = sum(one * math.log(one / two) for one, two in zip(p, q, strict=True))
    lam = math.exp(-3.0 * alpha)
    return {"ce": -math.log(q[label]), "kl": kl, "nla": -math.log(alpha),
            "lk": lam * kl + (1 - lam) * (1 - alpha),
            "tv": sum(abs(one - two) for one, two in zip(p, q, strict=True)) / 2}[name]


@pytest.mark.parametrize("kind", TERMS)
@given(seed=st.integers(0, 10_000))
def test_each_loss_is_its_formula(kind: type[losses.Term], seed: int) -> None:
    logits, labels, teacher = drawn(seed)
    found = kind()(logits, labels, teacher)
    assert found.dtype == torch.float32
    expected = [written_out(kind.name, *row) for row in zip(logits, labels.tolist(), teacher, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-6,
                               rtol=2e-5)


@pytest.mark.parametrize("kind", TERMS)
def test_a_loss_of_narrow_logits_is_float32_and_moves_no_teacher(kind: type[losses.Term]) -> None:
    logits, labels, teacher = drawn(3)
    logits, teacher = logits.bfloat16(), teacher.requires_grad_()
    free = logits.clone().requires_grad_()
    found = kind()(free, labels, teacher)
    torch.testing.assert_close(found, kind()(logits.float(), labels, teacher), atol=0, rtol=0)
    found.sum().backward()
    assert free.grad is not None and teacher.grad is None


def test_kl_has_the_gradient_of_the_soft_cross_entropy() -> None:
    logits, labels, teacher = drawn(4)
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses.ForwardKL()(one, labels, teacher).sum().backward()
    (-(teacher.softmax(-1) * two.log_softmax(-1)).sum()).backward()
    torch.testing.assert_close(one.grad, two.grad)


def test_equal_distributions_lose_nothing() -> None:
    logits, labels, _ = drawn(5)
    for kind in TERMS[1:]:
        assert float(kind()(logits, labels, logits.clone()).abs().max()) < 1e-6
    assert float((losses.overlap(logits, logits.clone()) - 1).abs().max()) < 1e-6


def test_exponential_weights_fall_by_one_factor() -> None:
    counted = torch.tensor([[True, True, False, True]])
    found = losses.Exponential(gamma=2.0)(counted, None)
    assert found.tolist()[0] == pytest.approx([1.0, math.exp(-0.5), 0.0, math.exp(-1.5)])
    assert losses.Exponential(None)(counted, None).tolist() == [[1.0, 1.0, 0.0, 1.0]]
    step = losses.Exponential(gamma=-1 / math.log(0.8))(torch.ones(1, 3, dtype=torch.bool), None)
    assert step.tolist()[0] == pytest.approx([1.0, 0.8, 0.64])


@given(seed=st.integers(0, 10_000), smoothing=st.floats(0.0, 1.0))
def test_dpace_weighs_a_position_by_what_depends_on_it(seed: int, smoothing: float) -> None:
    """Written out: w_k = m_k sum over j >= k of m_j times the product of r_1..r_j."""
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(3, 5, generator=generator) * 4
    counted = torch.rand(3, 5, generator=generator) < 0.7
    found = losses.DPace(smoothing)(counted, entropy.requires_grad_())
    assert not found.requires_grad
    for row, mask, weights in zip(entropy.tolist(), counted.tolist(), found.tolist(), strict=True):
        rates = [(1 - smoothing) * math.exp(-each) + smoothing if kept else 1.0
                 for each, kept in zip(row, mask, strict=True)]
        expected = [sum(math.prod(rates[:j + 1]) for j in range(k, 5) if mask[j]) if mask[k] else 0.0
                    for k in range(5)]
        assert weights == pytest.approx(expected, abs=1e-5)


def test_an_objective_weighs_its_terms_and_tells_what_it_reads() -> None:
    logits, labels, teacher = drawn(6)
    both = losses.Objective([losses.CrossEntropy(0.1), losses.TotalVariation(1.8)], losses.Exponential(4.0))
    assert both.needs_teacher and both.needs_labels
    found = both.columns(logits, labels, teacher)
    assert found.shape == (5, 2)
    torch.testing.assert_close(found[:, 0], 0.1 * losses.CrossEntropy()(logits, labels, None))
    torch.testing.assert_close(found[:, 1], 1.8 * losses.TotalVariation()(logits, labels, teacher))
    soft = losses.Objective([losses.ForwardKL()])
    assert soft.needs_teacher and not soft.needs_labels
    paced = losses.Objective([losses.ForwardKL()], losses.DPace())
    assert paced.needs_labels and paced.columns(logits, labels, teacher).shape == (5, 2)


@pytest.mark.parametrize("terms", [[], [losses.CrossEntropy(), losses.CrossEntropy(0.5)]])
def test_an_objective_without_terms_or_with_one_twice_is_refused(terms: list[losses.Term]) -> None:
    with pytest.raises(UserError, match=r"drafter.objective.terms has .*; name each loss once"):
        losses.Objective(terms)
