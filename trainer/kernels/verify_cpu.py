"""Verification on a CPU: the function of `verify_reference`, all requests together.

Rows are read in order and once, in the head's type: no row behind the first rejection unless a few at a time
are cheaper than one (block verification needs all). """

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.kernels.cpu_rows import Rows, draft_chances, most_likely
from trainer.kernels.philox import ACCEPT, EMIT, uniform
from trainer.kernels.verification import Verification, Verified

AT_ONCE = 2 ** 19  # elements: to look at fewer costs as much
FAULTY = -2
TINY = 1e-38


def verify(step: Verification) -> Verified:
    """See the records. Values are not checked."""
    if step.target_logits.device.type != "cpu":
        raise ValueError(f"the logits are on {step.target_logits.device}; this path takes those of a CPU")
    lengths = step.starts.diff().long()
    starts = step.starts[:-1].long()
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    accepted, emitted = torch.zeros_like(starts), torch.full_like(starts, -1)
    greedy = step.sampling.temperature == 0
    for some, decide in ((greedy, _greedy), (~greedy, _block if step.block else _one_by_one)):
        if some.any():
            some = some.nonzero()[:, 0]
            accepted[some], emitted[some] = decide(step, request, starts[some], lengths[some])
    place = torch.arange(int(lengths.max()))
    drafts = step.drafts[(starts[:, None] + place).clamp_(max=len(step.drafts) - 1)]
    tokens = torch.nn.functional.pad(drafts.masked_fill_(place >= accepted[:, None], -1), (0, 1), value=-1)
    tokens.scatter_(1, accepted[:, None], emitted.clamp(min=-1)[:, None])
    counts = accepted + (emitted >= 0)
    return Verified(tokens[:, :-1], torch.where(emitted == FAULTY, -1 - counts, counts).int())


def _walk(step: Verification, starts: Tensor, lengths: Tensor, look: Callable[[Tensor], Tensor]) -> Tensor:
    """How many rows of each request, int64, are accepted in order: `look` says of rows [n] int64 which are.
    Rows behind the first other one are looked at only together with it."""
    accepted, alive = torch.zeros_like(starts), torch.arange(len(starts))
    while len(alive):
        several = max(1, AT_ONCE // (len(alive) * step.vocab_size))
        place = accepted[alive, None] + torch.arange(several)
        there = place < lengths[alive, None]
        right = torch.zeros(place.shape, dtype=torch.bool)
        right[there] = look((starts[alive, None] + place)[there])
        more = right.long().cumprod(1).sum(1)
        accepted[alive] += more
        alive = alive[(more == several) & (accepted[alive] < lengths[alive])]
    return accepted


def _greedy(step: Verification, request: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of each request: rows accepted, and the token that the next one emits, -1 without one, FAULTY."""
    logits, best = step.target_logits[:, :step.vocab_size], torch.full_like(step.drafts, FAULTY)

    def look(rows: Tensor) -> Tensor:
        best[rows] = most_likely(logits, rows.tolist())
        return best[rows] == step.drafts[rows]

    accepted = _walk(step, starts, lengths, look)
    return accepted, best[(starts + accepted).clamp_(max=len(best) - 1)].masked_fill_(accepted == lengths, -1)


def _one_by_one(step: Verification, request: Tensor, starts: Tensor, lengths: Tensor
                ) -> tuple[Tensor, Tensor]:
    """As `_greedy`, for requests that sample."""
    draw = _Draws(step, request)
    needed = draw.numbers(torch.arange(len(request)), ACCEPT) * draft_chances(step, request)
    rows = Rows(step, request, needed)

    def look(some: Tensor) -> Tensor:
        rows.look(some)
        return (needed[some] < rows.chance(some)) & ~rows.faulty[some]

    accepted = _walk(step, starts, lengths, look)
    return accepted, draw.behind(rows, starts, lengths, accepted, torch.ones(len(starts)).double())


def _block(step: Verification, request: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """As `_one_by_one`, by block verification: `weight` is the run weight of the drafts up to a place."""
    rows, draw, place = Rows(step, request), _Draws(step, request), torch.arange(int(lengths.max()))
    at = (starts[:, None] + place).clamp_(max=len(request) - 1)
    there = place < lengths[:, None]
    drafts = (there & (step.drafts[at] >= 0)).long().cumprod(1).bool()
    drafted = drafts.sum(1)
    needed = there & (place <= drafted[:, None])
    rows.look(at[needed])
    ratio = torch.zeros(at.shape, dtype=torch.float64)
    ratio[drafts] = rows.chance(at[drafts]) / draft_chances(step, request)[at[drafts]].clamp_(min=TINY)
    weight = torch.ones(len(starts), len(place) + 1, dtype=torch.float64)
    for index in range(len(place)):
        weight[:, index + 1] = (weight[:, index] * ratio[:, index]).clamp_(max=1)
    mass = torch.zeros_like(weight)  # of what is left behind so many drafts
    inner = drafts & (place > 0)
    mass[:, :-1][inner] = rows.residual_masses(at[inner], weight[:, :-1][inner])
    mass, after = mass[:, 1:], weight[:, 1:]
    chance = torch.where(mass + 1 > after, mass / (mass + 1 - after), 1)
    chance = torch.where(place + 1 < drafted[:, None], chance, after)
    small = torch.zeros_like(drafts)
    small[drafts] = draw.numbers(at[drafts], ACCEPT, 1 + place.expand_as(at)[drafts]) < chance[drafts]
    accepted = (small * (place + 1)).amax(1)
    faulty = (needed & rows.faulty[at]).any(1)
    accepted.masked_fill_(faulty, 0)
    emitted = draw.behind(rows, starts, lengths, accepted, weight.gather(1, accepted[:, None])[:, 0])
    return accepted, emitted.masked_fill_(faulty, FAULTY)


class _Draws:
    """Random numbers and what they draw."""

    def __init__(self, step: Verification, request: Tensor) -> None:
        self.drafts, self.seed = step.drafts, step.sampling.seed[request]
        first = step.starts[:-1].long()[request]
        self.position = step.sampling.position[request] + torch.arange(len(request)) - first

    def numbers(self, rows: Tensor, stream: int, turn: Tensor | None = None) -> Tensor:
        return uniform(self.seed[rows], self.position[rows], stream, turn)

    def behind(self, rows: Rows, starts: Tensor, lengths: Tensor, accepted: Tensor, weight: Tensor) -> Tensor:
        """The token behind the accepted ones of each request: -1 without a row for it, or FAULTY."""
        emitted, there = torch.full_like(starts, -1), accepted < lengths
        at = (starts + accepted)[there]
        emitted[there] = self._token(rows, at, weight[there]).masked_fill_(rows.faulty[at], FAULTY)
        return emitted

    def _token(self, rows: Rows, at: Tensor, weight: Tensor) -> Tensor:
        """A token of each row in `at`: of the target, or of what is left of it where a draft was rejected."""
        number, draft, tokens = self.numbers(at, EMIT), self.drafts[at], torch.full_like(at, -1)
        if not rows.one_hot:
            for some in rows.chunks((draft >= 0).nonzero()[:, 0]):
                left = rows.residual(at[some], weight[some])
                tokens[some] = _of_weights(left, number[some])
            draft = torch.full_like(draft, -1)
        rest = (tokens < 0).nonzero()[:, 0]
        if len(rest):
            tokens[rest] = _of_target(rows, at[rest], draft[rest], number[rest])
        return tokens


def _of_target(rows: Rows, at: Tensor, without: Tensor, number: Tensor) -> Tensor:
    """A token of the target at each row in `at`, none of `without` unless that is all there is."""
    def inside(block: Tensor) -> Tensor:
        ids = block[:, None] * rows.width + torch.arange(rows.width)
        return rows.weights(at, ids).masked_fill_(ids == without[:, None], 0)

    masses = rows.masses[at].double()
    own = without.clamp(0, rows.size - 1) // rows.width
    masses.scatter_(1, own[:, None], inside(own).sum(1, keepdim=True))
    alone = (masses.sum(1) == 0) & (without >= 0)
    if alone.any():
        return _of_target(rows, at, without.masked_fill(alone, -1), number)
    return _two_levels(masses, inside, number)


def _of_weights(weights: Tensor, number: Tensor) -> Tensor:
    """The ids at numbers [n] of weights [n, blocks, width], -1 where all are 0."""
    masses, index = weights.sum(2).double(), torch.arange(len(weights))
    drawn = _two_levels(masses, lambda block: weights[index, block].double(), number)
    return drawn.masked_fill_(masses.sum(1) == 0, -1)


def _two_levels(masses: Tensor, inside: Callable[[Tensor], Tensor], number: Tensor) -> Tensor:
    """The ids at numbers [n] in [0, 1) of weights that have masses [n, blocks] float64; `inside` gives those
    of a block [n] of each, [n, width] float64."""
    running = masses.cumsum(1)
    place = number * running[:, -1]
    block = _crossing(masses, place)
    before = torch.nn.functional.pad(running, (1, 0)).gather(1, block[:, None])[:, 0]
    weights = inside(block)
    return block * weights.shape[1] + _crossing(weights, place - before)


def _crossing(weights: Tensor, place: Tensor) -> Tensor:
    """[n]: the first of weights [n, m] that takes their sum beyond place [n], or the last that is not 0."""
    index, some = torch.arange(weights.shape[1]), weights > 0
    beyond = torch.where(some & (weights.cumsum(1) > place[:, None]), index, len(index)).amin(1)
    return torch.where(beyond < len(index), beyond, torch.where(some, index, 0).amax(1))
