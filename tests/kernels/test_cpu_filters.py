"""What the CPU path's filters are made of, each against the plainest way to say it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.kernels import cpu_filters

BITS = torch.arange(-2 ** 15, 2 ** 15, dtype=torch.int16)


@pytest.mark.parametrize(("bits", "dtype"), [
    (BITS, torch.bfloat16), (BITS, torch.float16), (BITS.int() * 65521, torch.float32)], ids=str)
def test_bits_become_the_numbers_that_they_are(bits: torch.Tensor, dtype: torch.dtype) -> None:
    expected = bits.view(dtype).float()
    found = torch.from_numpy(cpu_filters.floats(bits.numpy(), dtype))
    assert torch.equal(found.isnan(), expected.isnan()) and int(expected.isnan().sum()) > 100
    assert torch.equal(found[~found.isnan()], expected[~found.isnan()])


def test_the_kth_largest_is_told_where_there_are_so_many() -> None:
    peaks = torch.tensor([[3.0, 1, 2, 3]]).repeat(6, 1)
    found = cpu_filters.kth_largest(peaks, torch.tensor([0, 1, 2, 3, 4, 5]))
    assert found.tolist() == [-math.inf, 3, 3, 2, 1, -math.inf]
    assert cpu_filters.kth_largest(peaks, torch.zeros(6, dtype=torch.int64)).tolist() == [-math.inf] * 6


def test_what_is_dropped_is_below_the_edge_and_not_at_it() -> None:
    edge = torch.tensor(1.7)
    around = [torch.nextafter(edge, torch.tensor(way)) for way in (-math.inf, math.inf)]
    line = torch.stack([*around, edge, -edge, torch.tensor(math.inf), torch.tensor(-math.inf)])
    same = line.clone()
    cpu_filters.drop_below(same, -math.inf)
    assert torch.equal(same, line)
    cpu_filters.drop_below(line, float(edge))
    assert line.tolist() == [-math.inf, float(around[1]), float(edge), -math.inf, math.inf, -math.inf]


def slow(line: list[float], rest: float) -> tuple[float, int]:
    """The edge of top-p, one number after the other."""
    highest, below = max(line), 0.0
    total = math.fsum(math.exp(value - highest) for value in line)
    upwards = sorted(range(len(line)), key=lambda place: (line[place], -place))
    for place in upwards[:-1]:
        below += math.exp(line[place] - highest)
        if below > rest * total:
            return line[place], place
    return line[upwards[-1]], upwards[-1]


@pytest.mark.parametrize("ties", [1, 8, 1000])
@pytest.mark.parametrize("rest", [1e-9, 0.03, 0.5, 0.97, 1.0])
def test_the_edge_of_top_p_is_where_counting_finds_it(rest: float, ties: int) -> None:
    for size in (1, 5, 1024, 3000):
        line = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2
        line = (line * ties).round().div(ties).numpy()
        highest, ids = float(line.max()), np.arange(size)
        expected = slow(line.tolist(), rest)
        assert cpu_filters.nucleus(line, highest, rest) == expected
        weights = np.exp(line.astype(np.float64) - highest)
        assert cpu_filters.nucleus_of_few(line, ids, weights, rest, 0.0) == expected
        kept = line >= np.sort(line)[size // 4] if rest > 0.5 else line >= line.min()
        outside = float(weights[~kept].sum())
        assert outside <= rest * weights.sum()
        assert cpu_filters.nucleus_of_few(line[kept], ids[kept], weights[kept], rest, outside) == expected
