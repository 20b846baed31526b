"""Samples -> packed rows of at most `tokens` tokens, in an order that is a pure function of seed and epoch.

Samples are shuffled, then packed best-fit within a window of open rows; what stays free at the end of a row
is padding. Attention and anchors never cross a sample (`Batch.document`). Samples longer than a row are for
`require_fit` to refuse, long before a step. Which rows make a step is a matter of their order alone; only
then are they dealt to the processes that train, to each about as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.records import Batch, HiddenStates, Sample

WINDOW = 8  # open rows that a sample may still be put into


def seed_of(*parts: object) -> int:
    """A 62-bit seed from any parts, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 2


def require_fit(samples: Sequence[Sample], tokens: int) -> None:
    """Raises UserError when a sample, the longest is named, is longer than a packed row."""
    longest = max(samples, key=lambda sample: len(sample.tokens))
    length = len(longest.tokens)
    if length > tokens:
        raise UserError(f"sample {longest.id} has {length} tokens but train.tokens={tokens}, the length of a "
                        f"packed row; set train.tokens={length} or more, or have shorter answers "
                        "(responses.sampling.max_new_tokens, or responses.max_length for given ones)")


def plan_epoch(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of one epoch as lists of sample indices; no length may exceed `tokens`."""
    assert max(lengths) <= tokens, f"a sample of {max(lengths)} tokens does not fit into {tokens}"
    generator = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    order = torch.randperm(len(lengths), generator=generator)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order.tolist():
        fits = [row for row in range(max(0, len(rows) - WINDOW), len(rows)) if room[row] >= lengths[index]]
        if fits:
            row = min(fits, key=lambda each: room[each])
            rows[row].append(index)
            room[row] -= lengths[index]
        else:
            rows.append([index])
            room.append(tokens - lengths[index])
    return rows


def padding(rows: Sequence[Sequence[int]], lengths: Sequence[int], tokens: int) -> float:
    """The share of the rows that no sample fills, 0 to 1; `lengths` are those of all samples."""
    real = sum(lengths[index] for row in rows for index in row)
    return 1 - real / (tokens * len(rows)) if rows else 0.0


def dealt(loads: Sequence[int], shares: int) -> list[list[int]]:
    """The rows of one step, by their numbers in it, for each of `shares` processes: to all the same number of
    rows, as training goes through them together, and about the same sum of `loads`. The heaviest goes first,
    to whom has least (R. Graham, 1969, longest processing time, with a bound on the number of rows)."""
    assert len(loads) % shares == 0, f"{len(loads)} rows cannot be dealt to {shares} processes alike"
    most = len(loads) // shares
    found: list[list[int]] = [[] for _ in range(shares)]
    sums = [0] * shares
    for number in sorted(range(len(loads)), key=lambda each: (-loads[each], each)):
        least = min((share for share in range(shares) if len(found[share]) < most),
                    key=lambda share: (sums[share], share))
        found[least].append(number)
        sums[least] += loads[number]
    return [sorted(numbers) for numbers in found]


def collate(samples: Sequence[Sample], states: Sequence[HiddenStates], seed: int, device: str,
            tokens: int | None = None) -> Batch:
    """One packed row of whole samples, filled up to `tokens` with unsupervised padding of document -1 (a
    fixed length compiles once; padding is seen by nothing)."""
    lengths = [len(sample.tokens) for sample in samples]
    fill = (tokens or sum(lengths)) - sum(lengths)
    assert fill >= 0, f"{sum(lengths)} tokens do not fit into {tokens}"
    flags = [flag for sample in samples for flag in sample.loss_mask]
    document = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    return Batch(
        tokens=_filled(torch.tensor([token for sample in samples for token in sample.tokens]), fill, 0,
                       device),
        loss_mask=_filled(torch.tensor(flags), fill, 0, device),
        document=_filled(document, fill, -1, device),
        position=_filled(torch.cat([torch.arange(length) for length in lengths]), fill, 0, device),
        taps=_filled(torch.cat([state.taps for state in states]), fill, 0, device),
        last=_filled(torch.cat([state.last for state in states]), fill, 0, device),
        seed=seed)


def _filled(rows: Tensor, fill: int, value: int, device: str) -> Tensor:
    """rows [n, ...] with `fill` rows of `value` after them."""
    return torch.cat([rows, rows.new_full((fill, *rows.shape[1:]), value)]).to(device)
