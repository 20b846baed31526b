"""The first of the Triton kernels of verification: they read the target's logits, each once, and note of
every logical block what decides. A program has some blocks of one row; notes do not depend on how many. """

from __future__ import annotations

import triton
import triton.language as tl

from trainer.kernels.triton_filters import filtered
from trainer.kernels.triton_parts import (
    BLOCK,
    CELL,
    EDGE,
    HIGHEST,
    KEPT,
    LAST,
    TOKEN,
    TOTAL,
    key_of,
    numbers,
    row_of,
    slot_of,
)


@triton.jit
def best_of_blocks(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, starts: tl.tensor,
                   per: tl.tensor, best: tl.tensor) -> None:
    """Of a row's blocks that this program has, the largest logit and the lowest id that has it as one int64
    that rises with the one and falls with the other: best [slots, programs]. Grid: requests, rows of one,
    programs of `per` blocks."""
    request, part = tl.program_id(0), tl.program_id(2)
    row, slot = tl.load(starts + request) + tl.program_id(1), slot_of(request, tl.program_id(1))
    if row < tl.load(starts + request + 1):
        place = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        found = tl.zeros([BLOCK], tl.int32)
        first = part * per
        for block in range(first, tl.minimum(first + per, tl.cdiv(size, BLOCK))):
            ids = block * BLOCK + place
            values = numbers(logits + row.to(tl.int64) * stride, ids, ids < width)
            larger = (values > top) & (ids < size)
            top = tl.where(larger, values, top)
            found = tl.where(larger, ids, found)
        highest = tl.max(top, 0)
        lowest = tl.min(tl.where(top == highest, found, 0x7FFFFFFF), 0)
        both = (key_of(highest).to(tl.int64) << 32) | (0x7FFFFFFF - lowest).to(tl.int64)
        tl.store(best + slot * tl.num_programs(2) + part, both)


@triton.jit
def note_blocks(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, starts: tl.tensor,
                temperature: tl.tensor, per: tl.tensor, notes: tl.tensor, cells: tl.tensor,
                BLOCKS: tl.constexpr) -> None:
    """The notes of blocks (`triton_parts.row_of`), and unless `cells` is None the largest logit of each cell,
    [slots, cells] in the head's type. Grid: requests, rows of one, programs of `per` blocks."""
    request = tl.program_id(0)
    row, slot = tl.load(starts + request) + tl.program_id(1), slot_of(request, tl.program_id(1))
    if row < tl.load(starts + request + 1):
        heat, blocks = tl.load(temperature + request), tl.cdiv(size, BLOCK)
        noted = row_of(notes, slot, BLOCKS)
        first = tl.program_id(2) * per
        for block in range(first, tl.minimum(first + per, blocks)):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            values = numbers(logits + row.to(tl.int64) * stride, ids, ids < width)
            values = tl.where(ids < size, values, -float("inf"))
            if cells is not None:
                tops = tl.max(tl.reshape(values, [BLOCK // CELL, CELL]), 1)
                cell = (slot * blocks + block) * (BLOCK // CELL) + tl.arange(0, BLOCK // CELL)
                tl.store(cells + cell, tops.to(cells.dtype.element_ty))
            if heat > 0:
                if heat != 1:
                    values = tl.div_rn(values, heat)
                highest = tl.max(values, 0)
                second = tl.sum(tl.exp(values - tl.where(highest > -float("inf"), highest, 0.0)), 0)
            else:
                highest = tl.max(values, 0)
                place = tl.where(values == highest, tl.arange(0, BLOCK), BLOCK)
                second = tl.min(place, 0).to(tl.float32)
            tl.store(noted + block, highest)
            tl.store(noted + BLOCKS + block, second)


@triton.jit
def note_rows(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, starts: tl.tensor,
              temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, notes: tl.tensor,
              cells: tl.tensor, lists: tl.tensor, BLOCKS: tl.constexpr) -> None:
    """The record of a row, of its blocks' notes: the largest logit over the temperature, the sum of
    exp(logit - it) over what the filters keep, the edge of what they keep, and the most likely token of
    greedy requests. There are no filters where `cells` is None. Grid: requests, rows of one."""
    request = tl.program_id(0)
    row, slot = tl.load(starts + request) + tl.program_id(1), slot_of(request, tl.program_id(1))
    if row < tl.load(starts + request + 1):
        heat, blocks = tl.load(temperature + request), tl.cdiv(size, BLOCK)
        noted, block = row_of(notes, slot, BLOCKS), tl.arange(0, BLOCKS)
        tops = tl.load(noted + block, mask=block < blocks, other=-float("inf"))
        seconds = tl.load(noted + BLOCKS + block, mask=block < blocks, other=0.0)
        highest = tl.max(tops, 0)
        sane = (highest > -float("inf")) & (highest < float("inf"))
        record = noted + 3 * BLOCKS
        tl.store(record + HIGHEST, highest)
        if heat == 0:
            chosen = tl.min(tl.where(tops == highest, block, BLOCKS), 0)
            place = tl.sum(tl.where(block == chosen, seconds, 0.0), 0).to(tl.int32)
            tl.store(record + TOKEN, (chosen * BLOCK + place).to(tl.float32, bitcast=True))
        elif sane:
            total = tl.sum((seconds * tl.exp(tops - highest)).to(tl.float64), 0)
            edge, last = -float("inf"), size
            if cells is not None:
                most, least = tl.load(top_k + request), tl.load(min_p + request)
                most, rest = tl.where(most < size, most, 0), 1 - tl.load(top_p + request)
                if (most > 0) | (rest > 0) | (least > 0):
                    at = slot * blocks * (BLOCK // CELL)
                    edge, last, total = filtered(
                        logits + row.to(tl.int64) * stride, width, size, heat, highest, total, most, rest,
                        least, cells + at, lists + at + slot * (2 * KEPT), BLOCKS)
            tl.store(record + TOTAL, total.to(tl.float32))
            tl.store(record + EDGE, edge)
            tl.store(record + LAST, last.to(tl.float32, bitcast=True))
