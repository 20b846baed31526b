"""min-p, top-k and top-p of one row, exactly, by one program that reads little of the row: the largest logits
of its cells tell which of them hold what can be kept, and of these a list is made. Where more tokens can be
kept than the list holds, their cells are read again at each look instead.

Tokens have an order, by the logit and among equals by the id, the lower one first: as one int64, a key. Both
top-k and top-p look for the lowest key that is kept, by halving a range of keys. """

from __future__ import annotations

import triton
import triton.language as tl

from trainer.kernels.triton_parts import BLOCK, CELL, KEPT, key_of, numbers, value_of

NOTHING = tl.constexpr(-(2 ** 62))  # below every key
NEITHER = tl.constexpr(-2139095041)  # key_of(-inf)
HALVINGS = tl.constexpr(26)  # of the range of all float32 numbers: a bound need not be tight


@triton.jit
def filtered(logits: tl.tensor, width: tl.tensor, size: tl.tensor, heat: tl.tensor, highest: tl.tensor,
             total: tl.tensor, most: tl.tensor, rest: tl.tensor, least: tl.tensor, cells: tl.tensor,
             lists: tl.tensor, BLOCKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Kept of a row is y, the logit over the temperature `heat`, above `edge`, and y = edge with an id up to
    `last`. Returns both, and the sum of exp(y - highest) over it, float64; `total` is that of everything.
    `most` is top-k or 0, `rest` 1 - top-p, `least` min-p. `cells` holds the largest logit of each of the
    row's cells; `lists` has room for an int32 for each of them and 2 KEPT more."""
    SPAN: tl.constexpr = BLOCKS * BLOCK  # of ids
    alone = (most == 0) & (least == 0)  # nothing is dropped before top-p
    bound, looks = _listed(cells, size, heat, highest, total, most, rest, least, alone, lists, BLOCKS)
    taken = lists + tl.cdiv(size, BLOCK) * (BLOCK // CELL)
    tl.debug_barrier()  # the list is read by other threads than those that made it
    count, inside = _take(logits, width, size, heat, highest, bound, lists, looks, taken)
    tl.debug_barrier()
    crowded, place = count > KEPT, tl.arange(0, KEPT)
    there = (place < count) & (count <= KEPT)
    y = tl.load(taken + place, mask=there, other=0).to(tl.float32, bitcast=True)
    ids = tl.load(taken + KEPT + place, mask=there, other=0)
    keys = tl.where(there, _keys(y, ids, SPAN), NOTHING)
    weights = tl.where(there, tl.exp(y - highest), 0.0).to(tl.float64)
    outside = tl.where(alone, tl.maximum(total - inside, 0.0), 0.0)
    edge = key_of(bound).to(tl.int64) * SPAN  # so far of all that equal the bound
    top = (key_of(highest).to(tl.int64) + 1) * SPAN
    if most > 0:
        edge = _lowest(edge, top, most.to(tl.float64), 0.0, keys, weights, logits, width, size, heat, highest,
                       lists, looks, crowded, True, SPAN)
        edge -= edge & (SPAN - 1)
    if rest > 0:
        whole = outside + _beyond(edge - 1, keys, weights, logits, width, size, heat, highest, lists, looks,
                                  crowded, False, SPAN)
        edge = _lowest(edge, top, rest.to(tl.float64) * whole, whole, keys, weights, logits, width, size,
                       heat, highest, lists, looks, crowded, False, SPAN)
    total = _beyond(edge - 1, keys, weights, logits, width, size, heat, highest, lists, looks, crowded, False,
                    SPAN)
    low = edge & (SPAN - 1)
    return value_of(((edge - low) // SPAN).to(tl.int32)), (-low + (SPAN - 1)).to(tl.int32), total


@triton.jit
def _listed(cells: tl.tensor, size: tl.tensor, heat: tl.tensor, highest: tl.tensor, total: tl.tensor,
            most: tl.tensor, rest: tl.tensor, least: tl.tensor, alone: tl.tensor, lists: tl.tensor,
            BLOCKS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """A logit over the temperature below which nothing is kept, and how many cells have one that reaches it:
    these are put on the list, in order."""
    CELLS: tl.constexpr = BLOCKS * (BLOCK // CELL)
    cell = tl.arange(0, CELLS)
    there = cell < tl.cdiv(size, BLOCK) * (BLOCK // CELL)
    y = tl.div_rn(tl.load(cells + cell, mask=there, other=-float("inf")).to(tl.float32), heat)
    # As many cells reach the bound as top-k keeps tokens; or, where top-p is alone, they have its share.
    weights = tl.where(alone, tl.exp(y - highest), 1.0)
    share = (1 - rest) * total.to(tl.float32) * 1.00001
    wanted = tl.where(alone, share, tl.where(most > 0, most.to(tl.float32), CELLS + 1.0))
    keys = key_of(y)
    high = key_of(highest) + 1
    low = high * 0 + NEITHER
    for _ in range(HALVINGS):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    # All that have less than their part of what top-p drops are dropped together.
    part = highest + tl.log(rest * total.to(tl.float32) / size) - 0.001
    bound = tl.maximum(value_of(low), tl.where(alone, part, highest + tl.log(least)))
    bound = tl.minimum(bound, highest)
    reach = there & (y >= bound)
    tl.store(lists + tl.cumsum(reach.to(tl.int32), 0) - 1, cell, mask=reach)
    return bound, tl.sum(reach.to(tl.int32), 0)


@triton.jit
def _look(logits: tl.tensor, width: tl.tensor, size: tl.tensor, heat: tl.tensor, lists: tl.tensor,
          looks: tl.tensor, first: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """y [KEPT] of the cells on the list from `first` on, their ids, and which of them there are."""
    place = first + tl.arange(0, KEPT // CELL)
    cell = tl.load(lists + place, mask=place < looks, other=-1)
    ids = tl.reshape(cell[:, None] * CELL + tl.arange(0, CELL)[None, :], [KEPT])
    y = numbers(logits, ids, (ids >= 0) & (ids < width))
    return tl.div_rn(y, heat), ids, (ids >= 0) & (ids < size)


@triton.jit
def _take(logits: tl.tensor, width: tl.tensor, size: tl.tensor, heat: tl.tensor, highest: tl.tensor,
          bound: tl.tensor, lists: tl.tensor, looks: tl.tensor, taken: tl.tensor
          ) -> tuple[tl.tensor, tl.tensor]:
    """How many tokens reach the bound, and their sum of exp(y - highest); KEPT of them are written down,
    their y first, then their ids."""
    count, inside = looks * 0, (highest * 0).to(tl.float64)
    for first in range(0, looks, KEPT // CELL):
        y, ids, there = _look(logits, width, size, heat, lists, looks, first)
        there = there & (y >= bound)
        inside += tl.sum(tl.where(there, tl.exp(y - highest), 0.0).to(tl.float64), 0)
        place = count + tl.cumsum(there.to(tl.int32), 0) - 1
        room = there & (place < KEPT)
        tl.store(taken + place, y.to(tl.int32, bitcast=True), mask=room)
        tl.store(taken + KEPT + place, ids, mask=room)
        count += tl.sum(there.to(tl.int32), 0)
    return count, inside


@triton.jit
def _keys(y: tl.tensor, ids: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    return key_of(y).to(tl.int64) * SPAN - ids + (SPAN - 1)


@triton.jit
def _beyond(key: tl.tensor, keys: tl.tensor, weights: tl.tensor, logits: tl.tensor, width: tl.tensor,
            size: tl.tensor, heat: tl.tensor, highest: tl.tensor, lists: tl.tensor, looks: tl.tensor,
            crowded: tl.tensor, COUNTING: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """How many tokens have a larger key, or their sum of exp(y - highest), float64."""
    above = tl.sum(tl.where(keys > key, 1.0 if COUNTING else weights, 0.0).to(tl.float64), 0)
    if crowded:
        for first in range(0, looks, KEPT // CELL):
            y, ids, there = _look(logits, width, size, heat, lists, looks, first)
            there = there & (_keys(y, ids, SPAN) > key)
            each = 1.0 if COUNTING else tl.exp(y - highest)
            above += tl.sum(tl.where(there, each, 0.0).to(tl.float64), 0)
    return above


@triton.jit
def _lowest(low: tl.tensor, high: tl.tensor, limit: tl.tensor, whole: tl.tensor, keys: tl.tensor,
            weights: tl.tensor, logits: tl.tensor, width: tl.tensor, size: tl.tensor, heat: tl.tensor,
            highest: tl.tensor, lists: tl.tensor, looks: tl.tensor, crowded: tl.tensor,
            COUNTING: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """The lowest key that is kept, from `low` to `high`: where COUNTING, of `limit` tokens; else that with
    which what is not above it, of `whole`, comes beyond `limit`. The highest token is always kept."""
    while low < high:
        middle = (low + high) >> 1
        above = _beyond(middle, keys, weights, logits, width, size, heat, highest, lists, looks, crowded,
                        COUNTING, SPAN)
        enough = above < limit if COUNTING else (above == 0) | (whole - above > limit)
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return low
