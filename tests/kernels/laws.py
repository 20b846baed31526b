"""The laws that verification has to keep, enumerated in Python's own numbers, and tests of drawn tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.kernels.verification import Sampling


def law(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0
        ) -> list[float]:
    """The chance of every token of one row, [V], under vLLM's filters."""
    row = [float("-inf") if math.isnan(value) else value
           for value in (logits.float() / torch.tensor(temperature)).tolist()]
    highest, alive = max(row), set(range(len(row)))
    if min_p > 0:
        alive = {token for token in alive if row[token] - highest >= math.log(min_p)}
    if 0 < top_k < len(row):
        kth = sorted(row)[-top_k]
        alive = {token for token in alive if row[token] >= kth}
    mass = {token: math.exp(row[token] - highest) for token in alive}
    total = math.fsum(mass.values())
    if top_p < 1:
        below = 0.0
        for token in sorted(alive, key=lambda each: (row[each], -each))[:-1]:
            below += mass[token]
            if below / total > 1 - float(torch.tensor(top_p)):
                break
            alive.remove(token)
    total = math.fsum(mass[token] for token in alive)
    return [mass[token] / total if token in alive else 0.0 for token in range(len(row))]


def settings(sampling: Sampling, index: int) -> tuple[float, int, float, float]:
    """What `law` takes of a request."""
    return (float(sampling.temperature[index]), int(sampling.top_k[index]), float(sampling.top_p[index]),
            float(sampling.min_p[index]))


def chain_law(rows: list[list[float]], start: int, length: int) -> Tensor:
    """[V ** length] float64: the law of `length` tokens behind `start`; rows[token] is the next one's."""
    table = torch.tensor(rows, dtype=torch.float64)
    chances, last = torch.ones(1, dtype=torch.float64), torch.tensor([start])
    for _ in range(length):
        chances = (chances[:, None] * table[last]).flatten()
        last = torch.arange(len(table)).repeat(len(last))
    return chances


def fit(found: Tensor, chances: Tensor) -> float:
    """The p-value of cells `found` [n] int64 under `chances` [cells], by chi squared, 0 if impossible."""
    counts, expected = torch.bincount(found, minlength=len(chances)).double(), chances * len(found)
    if counts[expected == 0].any():
        return 0.0
    expected, order = expected.sort()
    rare = int(max((expected < 5).sum(), (expected.cumsum(0) < 5).sum() + 1))  # these count as one cell
    counts, expected = (torch.cat([each[:rare].sum(0, keepdim=True), each[rare:]])
                        for each in (counts[order], expected))
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), max(1, len(expected) - 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))


def distance(found: Tensor, chances: Tensor) -> float:
    """Total variation between cells `found` and `chances`."""
    counts = torch.bincount(found, minlength=len(chances)).double()
    return float((counts / len(found) - chances).abs().sum() / 2)
