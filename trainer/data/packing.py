"""Samples -> packed rows of at most `tokens` tokens, in an order that is a pure function of seed and epoch.

Samples are shuffled, then packed first-fit within a window of open rows: nothing is padded, attention and
anchors never cross a sample (`Batch.document`). Samples longer than a row are for `require_fit` to refuse,
long before a step. """

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
