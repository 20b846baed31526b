"""Verification of drafts in plain PyTorch, a row at a time and in float64: the specification.

Greedy requests keep a draft while it is the target's most likely token. Others follow speculative sampling
(arXiv 2211.17192) or block verification (arXiv 2403.10444, algorithm 2): what they emit has the target's
distribution after temperature and filters, whatever the drafts. """

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainer.kernels.philox import ACCEPT, EMIT, uniform
from trainer.kernels.verification import Verification, Verified

BLOCK = 1024  # ids of a logical block: sampling takes a block first, then a token in it
TINY = 1e-38


class _Faulty(Exception):
    """A row without a finite maximum."""


def verify(step: Verification) -> Verified:
    """See the records. A ValueError says which of the step's values cannot be."""
    step.check_values()
    bounds = list(pairwise(step.starts.tolist()))
    tokens = torch.full((len(bounds), max(end - start for start, end in bounds)), -1)
    counts = torch.zeros(len(bounds), dtype=torch.int32)
    for index, (start, end) in enumerate(bounds):
        try:
            for token in _Request(step, index, start, end).walk():
                tokens[index, counts[index]] = token
                counts[index] += 1
        except _Faulty:
            counts[index] = -1 - counts[index]
    return Verified(tokens.to(step.drafts.device), counts.to(step.drafts.device))


@dataclass(frozen=True)
class _Request:
    """One request of a step: its rows are `start` up to `end`."""

    step: Verification
    index: int
    start: int
    end: int

    def walk(self) -> Iterator[int]:
        """The emitted tokens in order."""
        if self.step.sampling.temperature[self.index] == 0:
            return self._greedy()
        return self._block() if self.step.block else self._one_by_one()

    def _greedy(self) -> Iterator[int]:
        for row in range(self.start, self.end):
            best = int(self._logits(row).argmax())
            yield best
            if best != self.step.drafts[row]:
                return

    def _one_by_one(self) -> Iterator[int]:
        for row in range(self.start, self.end):
            target, draft = self._target(row), int(self.step.drafts[row])
            if draft < 0:
                yield draw(target, self._uniform(row, EMIT))
                return
            if self._uniform(row, ACCEPT) * self._chance(row) >= _at(target, draft):
                yield self._from_residual(row, target, 1.0)
                return
            yield draft

    def _block(self) -> Iterator[int]:
        drafts = self.step.drafts[self.start:self.end].tolist()
        drafted = next((index for index, draft in enumerate(drafts) if draft < 0), len(drafts))
        targets = [self._target(row) for row in range(self.start, min(self.start + drafted + 1, self.end))]
        accepted, weight, kept_weight = 0, 1.0, 1.0
        for index in range(drafted):
            row = self.start + index
            weight = min(weight * _at(targets[index], drafts[index]) / max(self._chance(row), TINY), 1.0)
            chance = weight
            if index + 1 < drafted:
                mass = float((weight * targets[index + 1] - self._drafter(row + 1)).clamp(min=0).sum())
                chance = mass / (mass + 1 - weight) if mass + 1 > weight else 1.0
            if self._uniform(row, ACCEPT, 1 + index) < chance:
                accepted, kept_weight = index + 1, weight
        yield from drafts[:accepted]
        row = self.start + accepted
        if accepted < drafted:
            yield self._from_residual(row, targets[accepted], kept_weight)
        elif row < self.end:
            yield draw(targets[accepted], self._uniform(row, EMIT))

    def _logits(self, row: int) -> Tensor:
        """[V] float32 over the temperature, if there is one; what is not a number is impossible."""
        logits = self.step.target_logits[row, :self.step.vocab_size].float()
        logits = logits.masked_fill(logits.isnan(), float("-inf"))
        temperature = self.step.sampling.temperature[self.index]
        if temperature > 0:
            logits = logits / temperature
        if not logits.max().isfinite():
            raise _Faulty
        return logits

    def _target(self, row: int) -> Tensor:
        """[V] float64: the distribution to keep."""
        sampling, logits = self.step.sampling, self._logits(row)
        kept = filtered(logits, int(sampling.top_k[self.index]), sampling.top_p[self.index],
                        sampling.min_p[self.index])
        return _softmax(logits, kept)

    def _drafter(self, row: int) -> Tensor:
        """[V] float64: the distribution that the row's draft was drawn from."""
        drawn, size = self.step.distribution, self.step.vocab_size
        chances = torch.zeros(size, dtype=torch.float64, device=self.step.drafts.device)
        if drawn is None:
            if self.step.drafts[row] < size:
                chances[self.step.drafts[row]] = 1
            return chances
        logits = drawn.logits[row].float()
        scaled = logits.masked_fill(logits.isnan(), float("-inf")) / drawn.temperature[self.index]
        known = (scaled.double() - drawn.lse[row].double()).exp()
        if drawn.token_ids is None:
            return known[:size]
        return chances.index_copy(0, drawn.token_ids, known)

    def _chance(self, row: int) -> float:
        """With which the row's draft was drawn."""
        drawn = self.step.distribution
        if drawn is None:
            return 1.0
        scaled = drawn.drawn_logit[row] / drawn.temperature[self.index]
        return float((scaled.double() - drawn.lse[row].double()).exp())

    def _from_residual(self, row: int, target: Tensor, weight: float) -> int:
        """A token of what the target has more than the drafter; of all if, by rounding, nothing is left."""
        residual = (weight * target - self._drafter(row)).clamp(min=0)
        if self.step.distribution is None:  # exactly the target without the draft
            residual = target.masked_fill(self._drafter(row) > 0, 0)
        return draw(residual if residual.sum() > 0 else target, self._uniform(row, EMIT))

    def _uniform(self, row: int, stream: int, turn: int = 0) -> float:
        sampling, here = self.step.sampling, slice(self.index, self.index + 1)
        position = sampling.position[here] + row - self.start
        return float(uniform(sampling.seed[here], position, stream, torch.full_like(position, turn)))


def filtered(scaled: Tensor, top_k: int, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[V] bool, what vLLM's filters keep of logits over the temperature [V] float32, in its order: min-p,
    top-k with all that equal the k-th, top-p over what is left. Among equals at the edge of top-p the lower
    ids stay. top_k 0, top_p 1 and min_p 0 keep all. """
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if min_p > 0:
        kept &= scaled >= scaled.max() + min_p.log()
    if 0 < top_k < len(scaled):
        kept &= scaled >= scaled.masked_fill(~kept, float("-inf")).topk(top_k).values[-1]
    if top_p < 1:
        upwards = len(scaled) - 1 - scaled.flip(0).sort(stable=True).indices  # of equals the higher id first
        dropped = _softmax(scaled, kept)[upwards].cumsum(0) <= 1 - top_p
        dropped[-1] = False
        kept[upwards[dropped]] = False
    return kept


def draw(weights: Tensor, number: float) -> int:
    """The id at `number`, in [0, 1), of the cumulated weights [V] float64: the block first, then in it."""
    blocks = torch.nn.functional.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK)
    sums = blocks.sum(1)
    place = number * float(sums.cumsum(0)[-1])
    block = _crossing(sums, place)
    return block * BLOCK + _crossing(blocks[block], place - float(sums[:block].sum()))


def _crossing(weights: Tensor, place: float) -> int:
    """The first index that takes the weights' sum beyond `place`; by rounding the last with any weight."""
    beyond = ((weights.cumsum(0) > place) & (weights > 0)).nonzero()
    return int(beyond[0] if len(beyond) else weights.nonzero()[-1])


def _softmax(scaled: Tensor, kept: Tensor) -> Tensor:
    return scaled.double().masked_fill(~kept, float("-inf")).softmax(0)


def _at(chances: Tensor, token: int) -> float:
    """Padding is never emitted."""
    return float(chances[token]) if token < len(chances) else 0.0
