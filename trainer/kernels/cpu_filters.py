"""What the filters of the CPU path need of a row's numbers. NumPy sorts and splits them with the processor's
vector instructions, many times faster than PyTorch. """

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SPAN = 1024  # numbers that are summed together


def floats(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The float32 numbers that have these bits, int16 or int32, in `dtype`."""
    if dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if dtype == torch.float16 else bits.view(np.float32)


def kth_largest(peaks: Tensor, top_k: Tensor) -> Tensor:
    """[n] float32: the top_k-th [n] largest number of each row of `peaks` [n, cells]; -inf for top_k 0 and
    where there are less."""
    told = (top_k > 0) & (top_k <= peaks.shape[1])
    if not told.any():
        return torch.full((len(top_k),), -torch.inf)
    several = peaks.topk(int(top_k[told].max())).values
    place = (top_k - 1).clamp_(0, several.shape[1] - 1)
    return several.gather(1, place[:, None])[:, 0].masked_fill_(~told, -torch.inf)


def drop_below(scaled: Tensor, edge: float) -> None:
    """Makes all numbers below a float32 impossible, in place."""
    below = float(np.nextafter(np.float32(edge), np.float32(-np.inf)))
    if below > -np.inf:
        torch.threshold_(scaled, below, -torch.inf)  # a comparison and a fill take thirty times as long


def nucleus_of_few(values: np.ndarray, ids: np.ndarray, weights: np.ndarray, rest: float, outside: float
                   ) -> tuple[float, int]:
    """`nucleus` of a few numbers `values` of rising `ids` and their `weights`, exp(value - highest) float64,
    where all others together, a mass `outside`, are dropped."""
    order = np.lexsort((-ids, values))  # of equals the higher id first
    running = weights[order].cumsum() + outside
    place = min(int(running.searchsorted(rest * running[-1], "right")), len(order) - 1)
    return float(values[order[place]]), int(ids[order[place]])


def nucleus(line: np.ndarray, highest: float, rest: float) -> tuple[float, int]:
    """What top-p keeps of all numbers of a row, `line` float32: those above the first that is returned, and
    those that equal it with an id up to the second. `rest` is the share that may be dropped: the lowest
    numbers are, of equals the higher ids first, while their mass is no larger. """
    order = np.sort(line)
    weights = torch.from_numpy(order).sub(highest).exp_().numpy()
    running = np.add.reduceat(weights, np.arange(0, len(order), SPAN), dtype=np.float64).cumsum()
    limit = rest * running[-1]
    span = min(int(running.searchsorted(limit, "right")), len(running) - 1)
    before = running[span - 1] if span else 0.0
    inside = weights[span * SPAN:(span + 1) * SPAN].cumsum(dtype=np.float64) + before
    place = min(span * SPAN + int(inside.searchsorted(limit, "right")), len(order) - 1)
    edge = order[place]
    equal = np.flatnonzero(line == edge)
    dropped = place - int(order.searchsorted(edge, "left"))
    return float(edge), int(equal[len(equal) - 1 - dropped])
