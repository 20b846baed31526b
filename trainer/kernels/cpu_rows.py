"""What the CPU path notes of the target's rows, a few rows at a time so that they stay in the cache: enough
to tell any token's chance and to draw one without the row. Of rows whose filters leave few ids only the cells
that have such ids are read as numbers. """

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from trainer.kernels.cpu_filters import drop_below, floats, kth_largest, nucleus, nucleus_of_few
from trainer.kernels.verification import Verification

BLOCK = 1024  # ids of a logical block: sampling takes a block first, then a token in it
CELL = 128  # ids of which the largest logit says whether a filter has to look at them
CACHED = 2 ** 18  # elements that are worked on together
FEW = 8  # a row is read by cells where no more than one of so many has to be
FIRST = (32, 256)  # so many cells are searched for all that top-p keeps before the whole row is
WHOLE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def runs(rows: list[int]) -> Iterator[slice]:
    """The rows, in their order, as slices that are evenly spaced."""
    start = 0
    while start < len(rows):
        step, end = 1, start + 1
        if end < len(rows) and rows[end] > rows[start]:
            step = rows[end] - rows[start]
            while end < len(rows) and rows[end] == rows[end - 1] + step:
                end += 1
        yield slice(rows[start], rows[end - 1] + 1, step)
        start = end


def largest(logits: Tensor, rows: list[int], width: int) -> Tensor:
    """[n, parts]: the largest logit of each `width` ids of some rows of `logits` [R, V], as the integer of
    its bits, wherever that is positive; elsewhere something that is not.

    A positive number's bits read as an integer rise with it, and those of negative ones are negative: the
    largest integer is the largest number wherever that is positive. Integers compare many times faster. """
    whole, inside = logits.view(WHOLE[logits.dtype]), logits.shape[1] // width * width
    parts = []
    for run in runs(rows):
        parts.append(whole[run, :inside].unflatten(1, (-1, width)).amax(2) if inside else whole[run, :0])
        if inside < logits.shape[1]:
            parts[-1] = torch.cat([parts[-1], whole[run, inside:].amax(1, keepdim=True)], 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def infinity(dtype: torch.dtype) -> int:
    """Bits of numbers are below it, those of positive infinity and of what is no number are not."""
    return int(torch.tensor(torch.inf, dtype=dtype).view(WHOLE[dtype]))


def most_likely(logits: Tensor, rows: list[int]) -> Tensor:
    """The lowest id of the largest logit of some rows of `logits` [R, V], int64; -2 where no finite number
    is the largest. What is not a number is impossible. """
    whole, size = logits.view(WHOLE[logits.dtype]), logits.shape[1]
    top, block = largest(logits, rows, BLOCK).max(1)
    ids = (block[:, None] * BLOCK + torch.arange(BLOCK)).clamp_(max=size - 1)
    best = ids.gather(1, whole[torch.tensor(rows)[:, None], ids].max(1, keepdim=True).indices)[:, 0]
    for index in ((top <= 0) | (top >= infinity(logits.dtype))).nonzero()[:, 0].tolist():
        row = logits[rows[index]].float()
        value, place = row.masked_fill(row.isnan(), -torch.inf).max(0)
        best[index] = place if value.isfinite() else -2
    return best


def draft_chances(step: Verification, request: Tensor) -> Tensor:
    """[R] float64: the chance with which each row's draft was drawn, `request` [R] as in `Rows`."""
    drawn = step.distribution
    if drawn is None:
        return torch.ones(len(request), dtype=torch.float64)
    return (drawn.drawn_logit / drawn.temperature[request] - drawn.lse).double().exp_()


class Rows:
    """Notes about the rows of sampled requests: `look` takes them, the other methods tell of rows looked at.

    For y, the logits over the temperature: `highest` [R] float32; `masses` [R, blocks] float32, the sums of
    exp(y - highest) over what the filters keep of each block, and `total` [R] float64 of all. Kept is y above
    `edge`, and y = edge with an id up to `last`. `faulty` [R]: no finite number is the highest.

    `needed` [R] float64, where it is given, is what the chance of a row's draft has to exceed. Top-p makes
    the chance of what it keeps larger: where it surely keeps the draft and the chance is enough without it,
    nothing is dropped, since nothing else is asked of such a row. """

    def __init__(self, step: Verification, request: Tensor, needed: Tensor | None = None) -> None:
        """`request` [R] int64: whose row it is."""
        rows, self.size = len(request), step.vocab_size
        self.step, self.logits = step, step.target_logits[:, :self.size]
        self.temperature = step.sampling.temperature[request]
        self.undivided = bool((self.temperature == 1).all())
        self.highest = torch.zeros(rows)
        self.width = min(BLOCK, -(-self.size // CELL) * CELL)  # of a block
        self.masses = torch.empty(rows, -(-self.size // self.width))
        self.total = torch.ones(rows, dtype=torch.float64)
        self.edge = torch.full((rows,), -torch.inf)
        self.last = torch.full((rows,), self.size)
        self.faulty = torch.zeros(rows, dtype=torch.bool)
        sampling = step.sampling
        self.min_p, self.rest = sampling.min_p[request], 1 - sampling.top_p[request]
        self.top_k = sampling.top_k[request].long()
        self.top_k[self.top_k >= self.size] = 0
        self.bounded = (self.top_k > 0) | (self.min_p > 0)
        self.filters = self.bounded | (self.rest > 0)
        self.nothing_filtered = not self.filters.any()
        self.one_hot = step.distribution is None
        self.draft_temperature = None if self.one_hot else step.distribution.temperature[request]
        enough = torch.full((rows,), torch.inf, dtype=torch.float64)  # of a draft's share without top-p
        self.draft = step.drafts.clamp(0, self.size - 1)
        if needed is not None:
            enough = torch.where(step.drafts == self.draft, 1.0001 * torch.maximum(needed, self.rest), enough)
        self.array = SimpleNamespace(enough=enough.numpy(), **{name: getattr(self, name).numpy() for name in (
            "highest", "masses", "total", "edge", "last", "faulty", "draft", "min_p", "rest", "top_k",
            "bounded", "filters")})  # the same memory: to take one number out of it costs far less

    def look(self, rows: Tensor) -> None:
        """Takes notes of rows [n] int64."""
        if not self.nothing_filtered:
            bounded = self.bounded[rows]
            if bounded.any():
                rows = torch.cat([rows[~bounded], self._look_at_few(rows[bounded])])
        for some in self.chunks(rows):
            self._look_at_all(some)

    def chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As many at a time as stay in the cache."""
        return rows.split(max(1, CACHED // (self.masses.shape[1] * self.width))) if len(rows) else ()

    def _look_at_few(self, rows: Tensor) -> Tensor:
        """Takes notes of bounded rows by the cells that reach the bound; returns those with too many."""
        bits = largest(self.logits, rows.tolist(), CELL)
        top, dtype, temperature = bits.amax(1), self.logits.dtype, self.temperature[rows]
        peaks = bits.clamp_(min=0).view(dtype).float()
        highest = top.view(dtype).float() / temperature
        least = highest + self.min_p[rows].log()  # -inf without min-p
        # No less than k logits reach the k-th largest of the cells'; less by what a division may round.
        bound = torch.maximum(least * temperature, kth_largest(peaks, self.top_k[rows])) * (1 - 2 ** -20)
        reached = peaks >= bound[:, None]
        few = (bound > 0) & (top < infinity(dtype)) & highest.isfinite()
        few &= reached.sum(1) * FEW <= peaks.shape[1]
        self.highest[rows] = torch.where(few, highest, 0)
        whole, reached = self.logits.view(WHOLE[dtype]).numpy(), reached.numpy()
        columns = zip(rows.tolist(), bound.numpy(), least.numpy(), temperature.numpy(), strict=True)
        for index, (row, lowest, edge, divisor) in enumerate(columns):
            if not few[index]:
                continue
            top_k = self.array.top_k[row]
            ids = (np.flatnonzero(reached[index])[:, None] * CELL + np.arange(CELL)).ravel()
            values = floats(whole[row].take(ids, mode="clip"), dtype)
            at = np.flatnonzero((values >= lowest) & (ids < self.size))
            values, ids = values[at] / divisor, ids[at]
            if 0 < top_k <= len(values):
                edge = max(edge, np.partition(values, -top_k)[-top_k])
            kept = values >= edge
            self._keep(row, values[kept], ids[kept], edge, 0.0)
        return rows[~few]

    def _keep(self, row: int, values: np.ndarray, ids: np.ndarray, edge: float, outside: float) -> None:
        """Notes a row of which nothing but `values`, float32 over the temperature, of rising `ids` may be
        kept; beside them is a mass `outside` that top-p drops."""
        noted, last = self.array, self.size
        weights = np.exp(values.astype(np.float64) - noted.highest[row])
        if noted.rest[row] > 0:
            edge, last = nucleus_of_few(values, ids, weights, float(noted.rest[row]), outside)
            kept = (values > edge) | (values == edge) & (ids <= last)
            ids, weights = ids[kept], weights[kept]
        noted.edge[row], noted.last[row], noted.total[row] = edge, last, weights.sum()
        noted.masses[row] = np.bincount(ids // self.width, weights, noted.masses.shape[1])

    def _look_at_all(self, rows: Tensor) -> None:
        scaled = self._scaled(rows)
        highest = scaled.amax(1)
        if not math.isfinite(highest.sum()):
            scaled.masked_fill_(scaled.isnan(), -torch.inf)
            highest = scaled.amax(1)
            self.faulty[rows] = ~highest.isfinite()
            highest.masked_fill_(~highest.isfinite(), 0)
        self.highest[rows] = highest
        if self.nothing_filtered:
            weights = scaled.sub_(highest[:, None]).exp_()
        else:
            for index, row in enumerate(rows.tolist()):
                if self.array.bounded[row] and not self.array.faulty[row]:
                    self._bound(row, scaled[index])
            weights = (scaled - highest[:, None]).exp_()
        masses = weights.unflatten(1, (-1, self.width)).sum(2)
        total = masses.double().sum(1)
        self.masses[rows], self.total[rows] = masses, total
        if not self.nothing_filtered:
            noted, shares = self.array, weights.numpy()
            for index, row in enumerate(rows.tolist()):
                if noted.rest[row] > 0 and not noted.faulty[row] and not (
                        shares[index, noted.draft[row]] > noted.enough[row] * noted.total[row]):
                    self._cut(row, scaled[index])

    def _scaled(self, rows: Tensor) -> Tensor:
        """[n, whole blocks] float32: the logits over the temperature, impossible ones behind them."""
        scaled = torch.empty(len(rows), self.masses.shape[1] * self.width)
        scaled[:, self.size:] = -torch.inf
        start = 0
        for run in runs(rows.tolist()):
            taken = self.logits[run]
            scaled[start:start + len(taken), :self.size] = taken
            start += len(taken)
        return scaled if self.undivided else scaled.div_(self.temperature[rows, None])

    def _bound(self, row: int, scaled: Tensor) -> None:
        """Notes the edge of min-p and top-k and makes impossible what is below it in `scaled` [ids]."""
        edge = float(self.highest[row] + self.min_p[row].log())
        if top_k := int(self.top_k[row]):
            edge = max(edge, float(np.partition(scaled.numpy(), -top_k)[-top_k]))
        self.edge[row] = edge
        drop_below(scaled, edge)

    def _cut(self, row: int, scaled: Tensor) -> None:
        """Notes what top-p keeps of a row that was noted without it."""
        noted = self.array
        highest, total, rest = noted.highest[row], noted.total[row], float(noted.rest[row])
        peaks, line = scaled.unflatten(0, (-1, CELL)).amax(1).numpy(), scaled.numpy()
        order = np.sort(peaks)
        for count in FIRST:
            lowest = order[-min(count, len(order))]
            ids = (np.flatnonzero(peaks >= lowest)[:, None] * CELL + np.arange(CELL)).ravel()
            values = line[ids]
            reached = values >= lowest
            values, ids = values[reached], ids[reached]
            outside = total - np.exp(values.astype(np.float64) - highest).sum()
            if outside < rest * total:
                self._keep(row, values, ids, noted.edge[row], max(outside, 0.0))
                return
        noted.edge[row], noted.last[row] = nucleus(line, highest, rest)
        self._drop(row, scaled)
        self.masses[row] = scaled.sub_(highest).exp_().unflatten(0, (-1, self.width)).sum(1)
        noted.total[row] = noted.masses[row].sum(dtype=np.float64)

    def _drop(self, row: int, scaled: Tensor) -> None:
        """Makes impossible what the row's filters drop of `scaled` [whole blocks]."""
        edge, last = float(self.array.edge[row]), int(self.array.last[row])
        drop_below(scaled, edge)
        if last < self.size:
            behind = scaled.numpy()[last + 1:]
            behind[np.flatnonzero(behind == edge)] = -np.inf

    def weights(self, rows: Tensor, ids: Tensor) -> Tensor:
        """[n, m] float64: the target's chances times `total`, of ids [n, m] int64; padding has none."""
        logits = self.logits[rows[:, None], ids.clamp(0, self.size - 1)].float()
        scaled = logits / self.temperature[rows, None]
        weights = (scaled - self.highest[rows, None]).double().exp_()
        none = (ids < 0) | (ids >= self.size)
        if self.nothing_filtered:  # small calls are what a step of few requests takes
            return weights.nan_to_num_(0).masked_fill_(none, 0)
        edge = self.edge[rows, None]
        kept = (scaled > edge) | (scaled == edge) & (ids <= self.last[rows, None])
        return weights.masked_fill_(~kept | none, 0)

    def chance(self, rows: Tensor) -> Tensor:
        """[n] float64: the target's chance of the rows' drafts; no draft has none."""
        return self.weights(rows, self.step.drafts[rows, None])[:, 0] / self.total[rows]

    def residual_masses(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[n] float64: the sums of max(weight x target - drafter, 0) of rows, weight [n] float64."""
        if self.one_hot:
            return weight * (1 - self.chance(rows))
        parts = zip(self.chunks(rows), self.chunks(weight), strict=True)
        return torch.cat([weight[:0], *(self.residual(*each).sum((1, 2)).double() for each in parts)])

    def residual(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[n, blocks, width] float32: what `residual_masses` sums where drafts were drawn from something."""
        drawn, left = self.step.distribution, _without_nan(self._scaled(rows))
        for index, row in enumerate(rows.tolist()):
            if self.array.filters[row]:
                self._drop(row, left[index])
        left.sub_(self.highest[rows, None]).exp_().mul_((weight / self.total[rows]).float()[:, None])
        chances = _without_nan(drawn.logits[rows].float() / self.draft_temperature[rows, None])
        chances.sub_(drawn.lse[rows, None]).exp_()
        if drawn.token_ids is None:
            left[:, :self.size] -= chances[:, :self.size]
        else:
            left.index_add_(1, drawn.token_ids, chances, alpha=-1)
        return left.clamp_(min=0).unflatten(1, (-1, self.width))


def _without_nan(logits: Tensor) -> Tensor:
    """The same numbers, in place; what is no number is impossible."""
    return logits.masked_fill_(logits.isnan(), -torch.inf) if logits.amax().isnan() else logits
