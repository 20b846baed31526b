"""The reduced draft vocabulary: which target tokens a drafter can propose.

Chosen from counts of supervised tokens alone, ties and unseen tokens by ascending id, special tokens forced
in. Rows ascend by target id, which is what a server's `d2t` offsets and every trainer's boolean `t2d` agree
on. """

from __future__ import annotations

import torch
from torch import Tensor


def choose(counts: Tensor, size: int, forced: tuple[int, ...]) -> Tensor:
    """The `size` target ids of the draft vocabulary, ascending, [size] int64. `counts` [V] int64."""
    rows = counts.numel()
    if not len(set(forced)) <= size <= rows:
        raise ValueError(f"drafter.draft_vocab_size={size} must lie between the {len(set(forced))} special "
                         f"tokens and the target's {rows} rows")
    ranked = counts.clone()
    ranked[list(forced)] = torch.iinfo(torch.int64).max
    return torch.argsort(ranked, descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that `ids` can express."""
    return float(counts[ids].sum() / counts.sum().clamp(min=1))


def offsets(ids: Tensor) -> Tensor:
    """`d2t` as servers read it: target id = row + d2t[row], [size] int64."""
    return ids - torch.arange(ids.numel())
