"""What the CPU path notes of the target's rows, a few rows at a time so that they stay in the cache, each
element read once: enough to tell any token's chance and to draw one without the row. """

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.kernels.verification import Verification

BLOCK = 1024  # ids of a logical block: sampling takes a block first, then a token in it
CELL = 128  # ids of which the largest logit says whether a filter has to look at them
CACHED = 2 ** 18  # elements that are worked on together
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


def most_likely(logits: Tensor, rows: list[int]) -> Tensor:
    """The lowest id of the largest logit of some rows of `logits` [R, V], int64; -2 where no finite number
    is the largest. What is not a number is impossible.

    A positive number's bits read as an integer rise with it, and those of negative ones are negative: the
    largest integer is the largest number wherever that is positive. Integers compare many times faster. """
    size = logits.shape[1]
    whole = logits.view(WHOLE[logits.dtype])
    infinity = int(torch.tensor(torch.inf, dtype=logits.dtype).view(whole.dtype))
    inside = size // BLOCK * BLOCK
    parts = []
    for run in runs(rows):
        parts.append(whole[run, :inside].unflatten(1, (-1, BLOCK)).amax(2) if inside else whole[run, :0])
        if inside < size:
            parts[-1] = torch.cat([parts[-1], whole[run, inside:].amax(1, keepdim=True)], 1)
    top, block = torch.cat(parts).max(1)
    at = torch.tensor(rows)
    ids = (block[:, None] * BLOCK + torch.arange(BLOCK)).clamp_(max=size - 1)
    best = ids.gather(1, whole[at[:, None], ids].max(1, keepdim=True).indices)[:, 0]
    for index in ((top <= 0) | (top >= infinity)).nonzero()[:, 0].tolist():
        row = logits[rows[index]].float()
        value, place = row.masked_fill(row.isnan(), -torch.inf).max(0)
        best[index] = place if value.isfinite() else -2
    return best


class Rows:
    """Notes about the rows of sampled requests: `look` takes them, the other methods tell of rows looked at.

    For y, the logits over the temperature: `highest` [R] float32; `masses` [R, blocks] float32, the sums of
    exp(y - highest) over what the filters keep of each block, and `total` [R] float64 of all. Kept is y above
    `edge`, and y = edge with an id up to `last`. `faulty` [R]: no finite number is the highest. """

    def __init__(self, step: Verification, request: Tensor) -> None:
        """`request` [R] int64: whose row it is."""
        rows, self.size = len(request), step.vocab_size
        self.step, self.logits = step, step.target_logits[:, :self.size]
        self.temperature = step.sampling.temperature[request]
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
        self.filters = (self.top_k > 0) | (self.rest > 0) | (self.min_p > 0)
        self.nothing_filtered = not self.filters.any()
        self.one_hot = step.distribution is None
        self.draft_temperature = None if self.one_hot else step.distribution.temperature[request]

    def look(self, rows: Tensor) -> None:
        """Takes notes of rows [n] int64."""
        for some in self.chunks(rows):
            self._look(some)

    def chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """As many at a time as stay in the cache."""
        return rows.split(max(1, CACHED // (self.masses.shape[1] * self.width))) if len(rows) else ()

    def _look(self, rows: Tensor) -> None:
        scaled = self._scaled(rows)
        cells = scaled.unflatten(1, (-1, self.width)).amax(2)
        highest = cells.amax(1)
        if not highest.isfinite().all():
            scaled.masked_fill_(scaled.isnan(), -torch.inf)
            highest = scaled.amax(1)
            self.faulty[rows] = ~highest.isfinite()
            highest.masked_fill_(~highest.isfinite(), 0)
        self.highest[rows] = highest
        if self.nothing_filtered:
            masses = scaled.sub_(highest[:, None]).exp_().unflatten(1, (-1, self.width)).sum(2)
        else:
            masses = (scaled - highest[:, None]).exp_().unflatten(1, (-1, self.width)).sum(2)
            filtered = (self.filters[rows] & ~self.faulty[rows]).nonzero()[:, 0]
            if len(filtered):
                masses[filtered] = self._filter(rows[filtered], scaled[filtered], masses[filtered])
        self.masses[rows] = masses
        self.total[rows] = masses.double().sum(1)

    def _scaled(self, rows: Tensor) -> Tensor:
        """[n, whole blocks] float32: the logits over the temperature, impossible ones behind them."""
        scaled = torch.empty(len(rows), self.masses.shape[1] * self.width)
        scaled[:, self.size:] = -torch.inf
        start = 0
        for run in runs(rows.tolist()):
            taken = self.logits[run]
            scaled[start:start + len(taken), :self.size] = taken
            start += len(taken)
        temperature = self.temperature[rows, None]
        return scaled if (temperature == 1).all() else scaled.div_(temperature)

    def _filter(self, rows: Tensor, scaled: Tensor, masses: Tensor) -> Tensor:
        """Notes `edge` and `last` of rows, and returns their masses of what is kept. `scaled` [n, whole
        blocks], `masses` [n, blocks] of everything."""
        top_k, rest = self.top_k[rows], self.rest[rows].double()
        highest, whole = self.highest[rows], masses.double().sum(1)
        least = highest + self.min_p[rows].log()  # -inf without min-p
        cells = scaled.unflatten(1, (-1, CELL)).amax(2)
        # No less than k logits reach the k-th largest of the cells' largest.
        bound = _largest(cells, scaled, top_k)
        bound = torch.maximum(bound, least)
        # All that have less than their share of what top-p drops are dropped together.
        share = highest + (rest * whole / self.size).log().float() - 1e-3
        alone = bound == -torch.inf
        bound = torch.minimum(torch.where(alone, share, bound), highest)
        values, ids = _candidates(scaled, cells, bound)
        kth = values.gather(1, top_k[:, None].sub(1).clamp(0, values.shape[1] - 1))[:, 0]
        kth.masked_fill_(top_k == 0, -torch.inf)
        weights = (values - highest[:, None]).exp_().double()
        weights.masked_fill_(values < torch.maximum(kth, least)[:, None], 0)
        inside = weights.sum(1)
        outside = torch.where(alone, (whole - inside).clamp_(min=0), 0)
        upwards = weights.flip(1).cumsum(1).flip(1) + outside[:, None]
        kept = (weights > 0) & (upwards > (rest * (inside + outside))[:, None])
        kept[:, 0] = True
        place = kept.sum(1, keepdim=True) - 1  # they stand in order
        self.edge[rows], self.last[rows] = values.gather(1, place)[:, 0], ids.gather(1, place)[:, 0]
        sums = torch.zeros_like(masses, dtype=torch.float64)
        return sums.scatter_add_(1, ids // self.width, weights.masked_fill_(~kept, 0)).float()

    def weights(self, rows: Tensor, ids: Tensor) -> Tensor:
        """[n, m] float64: the target's chances times `total`, of ids [n, m] int64; padding has none."""
        logits = self.logits[rows[:, None], ids.clamp(0, self.size - 1)].float()
        scaled, edge = logits / self.temperature[rows, None], self.edge[rows, None]
        kept = (scaled > edge) | (scaled == edge) & (ids <= self.last[rows, None])
        weights = (scaled - self.highest[rows, None]).exp_().double()
        return weights.masked_fill_(~kept | (ids < 0) | (ids >= self.size), 0)

    def chance(self, rows: Tensor) -> Tensor:
        """[n] float64: the target's chance of the rows' drafts; no draft has none."""
        return self.weights(rows, self.step.drafts[rows, None])[:, 0] / self.total[rows]

    def draft_chance(self, rows: Tensor) -> Tensor:
        """[n] float64: the chance with which a row's draft was drawn."""
        drawn = self.step.distribution
        if drawn is None:
            return torch.ones(len(rows), dtype=torch.float64)
        return (drawn.drawn_logit[rows] / self.draft_temperature[rows] - drawn.lse[rows]).double().exp_()

    def residual_masses(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[n] float64: the sums of max(weight x target - drafter, 0) of rows, weight [n] float64."""
        if self.one_hot:
            return weight * (1 - self.chance(rows))
        parts = zip(self.chunks(rows), self.chunks(weight), strict=True)
        return torch.cat([weight[:0], *(self.residual(*each).sum((1, 2)).double() for each in parts)])

    def residual(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[n, blocks, width] float32: what `residual_masses` sums where drafts were drawn from something."""
        drawn, highest, edge = self.step.distribution, self.highest[rows, None], self.edge[rows, None]
        left = self._scaled(rows)
        left.masked_fill_(left.isnan(), -torch.inf)
        dropped = None
        if self.filters[rows].any():
            ids = torch.arange(left.shape[1])
            dropped = (left < edge) | (left == edge) & (ids > self.last[rows, None])
        left.sub_(highest).exp_().mul_((weight / self.total[rows]).float()[:, None])
        if dropped is not None:
            left.masked_fill_(dropped, 0)
        logits = drawn.logits[rows].float() / self.draft_temperature[rows, None]
        chances = logits.masked_fill_(logits.isnan(), -torch.inf).sub_(drawn.lse[rows, None]).exp_()
        if drawn.token_ids is None:
            left[:, :self.size] -= chances[:, :self.size]
        else:
            left.index_add_(1, drawn.token_ids, chances, alpha=-1)
        return left.clamp_(min=0).unflatten(1, (-1, self.width))


def _largest(cells: Tensor, scaled: Tensor, top_k: Tensor) -> Tensor:
    """[n] float32: a number that top_k [n] or more of each row of `scaled` reach, -inf for top_k 0."""
    most = int(top_k.max())
    if most == 0:
        return torch.full((len(top_k),), -torch.inf)
    several = (cells if most <= cells.shape[1] else scaled).topk(most).values
    return several.gather(1, top_k[:, None].sub(1).clamp(min=0))[:, 0].masked_fill_(top_k == 0, -torch.inf)


def _candidates(scaled: Tensor, cells: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """values [n, m] float32 of all in `scaled` [n, ids] that reach bound [n], the largest first, of equals
    the lowest id first, -inf behind them; ids [n, m] int64."""
    row, cell = (cells >= bound[:, None]).nonzero().T
    taken = scaled.unflatten(1, (-1, CELL))[row, cell]
    some, place = (taken >= bound[row, None]).nonzero().T
    values, ids, row = taken[some, place], cell[some] * CELL + place, row[some]
    counts = row.bincount(minlength=len(scaled))
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    table = torch.full((len(scaled), int(counts.max())), -torch.inf)
    names = torch.zeros(table.shape, dtype=torch.int64)
    table[row, column], names[row, column] = values, ids
    table, order = table.sort(dim=1, descending=True, stable=True)
    return table, names.gather(1, order)
