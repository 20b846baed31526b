"""Losses of single positions, weights of positions in a draft, and the objective that combines them.

Everything is float32 and nothing is reduced here: a drafter sums over positions, the loop divides once by the
global count. `p` is the target's distribution and `q` the draft's, both renormalised on the draft vocabulary;
`alpha = sum min(p, q)` is the probability that rejection sampling accepts a token drawn from q.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import UserError
from trainer.ranges import Filled, NotNegative, Positive, Share

SMALLEST = 1e-5  # overlaps below it have no useful logarithm


@dataclass(frozen=True)
class Term(ABC):
    """One loss of a position; `weight` is its factor in the objective."""

    weight: NotNegative = 1.0

    name: ClassVar[str]
    needs_teacher: ClassVar[bool] = True  # False: it reads the token that came, not the target's distribution

    @abstractmethod
    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """logits [n, V]; labels [n] int64, the rows of the tokens that came; teacher [n, V] logits of the
        target -> [n] float32, without the weight. The teacher gets no gradient."""


class CrossEntropy(Term):
    """-log q[x], x the token that came: DFlash's own loss."""

    name, needs_teacher = "ce", False

    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")


class ForwardKL(Term):
    """sum p (log p - log q); its gradient is that of the soft cross-entropy of EAGLE."""

    name = "kl"

    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        target = _log_probabilities(teacher)
        return (target.exp() * (target - logits.float().log_softmax(-1))).sum(-1)


class TotalVariation(Term):
    """1 - alpha, half the L1 distance of p and q (DSpark counts the whole distance: twice this)."""

    name = "tv"

    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        return 1.0 - overlap(logits, teacher)


class NegativeLogAcceptance(Term):
    """-log alpha."""

    name = "nla"

    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        return -overlap(logits, teacher).clamp(min=SMALLEST).log()


@dataclass(frozen=True)
class LK(Term):
    """lam KL + (1 - lam)(1 - alpha), lam = exp(-eta alpha) without gradient: KL while the distributions are
    far apart, acceptance itself when they are near (arXiv 2602.23881)."""

    eta: NotNegative = 3.0

    name: ClassVar[str] = "lk"

    def __call__(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        alpha = overlap(logits, teacher)
        share = torch.exp(-self.eta * alpha.detach())
        return share * ForwardKL()(logits, labels, teacher) + (1.0 - share) * (1.0 - alpha)


def overlap(logits: Tensor, teacher: Tensor | None) -> Tensor:
    """alpha [n] float32 of draft logits and teacher logits, both [n, V]."""
    return torch.minimum(logits.float().softmax(-1), _log_probabilities(teacher).exp()).sum(-1)


class PositionWeights(ABC):
    """How much each position of a draft counts."""

    needs_cross_entropy: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, counted: Tensor, cross_entropy: Tensor | None) -> Tensor:
        """counted [A, S] bool, cross_entropy [A, S] where it is needed -> weights [A, S] float32, 0 where
        nothing is counted, without gradient. Position 0 is the first drafted token."""


@dataclass(frozen=True)
class Exponential(PositionWeights):
    """exp(-k / gamma) for position k; `gamma` null weighs all alike. A factor d a step is gamma = -1 / ln d
    (EAGLE's 0.8 is 4.48)."""

    gamma: Positive | None

    def __call__(self, counted: Tensor, cross_entropy: Tensor | None) -> Tensor:
        if self.gamma is None:
            return counted.float()
        steps = torch.arange(counted.shape[-1], dtype=torch.float32, device=counted.device)
        return torch.exp(-steps / self.gamma) * counted


@dataclass(frozen=True)
class DPace(PositionWeights):
    """Each position's share in a smooth surrogate of the expected accepted length (D-PACE, arXiv 2605.18810):
    r_k = (1 - a) exp(-CE_k) + a, w_k = sum over j >= k of the product of r_1..r_j; a is `smoothing`."""

    smoothing: Share = 0.5

    needs_cross_entropy: ClassVar[bool] = True

    def __call__(self, counted: Tensor, cross_entropy: Tensor | None) -> Tensor:
        assert cross_entropy is not None
        rates = (1.0 - self.smoothing) * torch.exp(-cross_entropy.detach().float()) + self.smoothing
        reached = torch.where(counted, rates, 1.0).cumprod(-1) * counted
        return reached.flip(-1).cumsum(-1).flip(-1) * counted


@dataclass(frozen=True)
class Objective:
    """The weighted terms of a position, and the weights of positions."""

    terms: Annotated[Sequence[Term], Filled()]
    positions: PositionWeights = field(default_factory=lambda: Exponential(None))

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) < len(names):
            raise UserError(f"drafter.objective.terms has {names or 'no terms'}; name each loss once")

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def needs_labels(self) -> bool:
        """Whether positions whose token is outside the draft vocabulary have to be left out."""
        return self.positions.needs_cross_entropy or any(not term.needs_teacher for term in self.terms)

    def columns(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """[n, terms] weighted losses, and one more column, the cross-entropy, where the weights of positions
        need it. Labels below 0 count as 0; the caller leaves those positions out."""
        labels = labels.clamp(min=0)
        found = [term(logits, labels, teacher) * term.weight for term in self.terms]
        if self.positions.needs_cross_entropy:
            found.append(CrossEntropy()(logits, labels, None).detach())
        return torch.stack(found, dim=-1)


def _log_probabilities(teacher: Tensor | None) -> Tensor:
    assert teacher is not None
    return teacher.detach().float().log_softmax(-1)
