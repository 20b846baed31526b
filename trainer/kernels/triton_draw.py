"""A token at random by the Triton kernels of verification: its logical block by the blocks' masses, then the
token by the weights in that block, which is read again. """

from __future__ import annotations

import triton
import triton.language as tl

from trainer.kernels.triton_parts import BLOCK, EDGE, HIGHEST, LAST, TOTAL, crossing, numbers, row_of


@triton.jit
def draw(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, noted: tl.tensor,
         row: tl.tensor, heat: tl.tensor, without: tl.tensor, share: tl.tensor, number: tl.tensor,
         drawn_logits: tl.tensor, drawn_stride: tl.tensor, drawn_temperature: tl.tensor, drawn_lse: tl.tensor,
         draft_ids: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """The token at `number`, in [0, 1), of a row of the target without one token, -1 for none; or, where
    `share` is not -1, of what is left of it, whose blocks' masses are noted. Of all if nothing is left."""
    block, blocks = tl.arange(0, BLOCKS), tl.cdiv(size, BLOCK)
    # Other programs noted these: past the cache that could have older ones.
    left = tl.load(noted + 2 * BLOCKS + block, mask=block < tl.where(share >= 0, blocks, 0), other=0.0,
                   cache_modifier=".cg")
    whole, tries = tl.sum(left.to(tl.float64), 0), tl.where(share >= 0, 1, 0)
    while (whole == 0) & (tries < 2):
        without, share = tl.where(tries > 0, -1, without), share * 0 - 1
        left = masses_left(logits, stride, width, size, noted, row, heat, without, share, drawn_logits,
                           drawn_stride, drawn_temperature, drawn_lse, draft_ids, 0, BLOCKS, BLOCKS)
        whole, tries = tl.sum(left.to(tl.float64), 0), tries + 1
    chosen, before = crossing(left.to(tl.float64), number * whole, BLOCKS)
    weights = _weights(logits, stride, width, size, noted, row, heat, without, share, drawn_logits,
                       drawn_stride, drawn_temperature, drawn_lse, draft_ids, chosen, BLOCKS)
    place, _ = crossing(weights.to(tl.float64), number * whole - before, BLOCK)
    return chosen * BLOCK + place


@triton.jit
def masses_left(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, noted: tl.tensor,
                row: tl.tensor, heat: tl.tensor, without: tl.tensor, share: tl.tensor,
                drawn_logits: tl.tensor, drawn_stride: tl.tensor, drawn_temperature: tl.tensor,
                drawn_lse: tl.tensor, draft_ids: tl.tensor, first: tl.tensor, until: tl.tensor,
                BLOCKS: tl.constexpr) -> tl.tensor:
    """float32 [BLOCKS]: the sums of `_weights` of blocks `first` up to `until`. Of the target they are noted,
    but for what a filter or the token that is left out changes: these blocks are read again."""
    block, blocks = tl.arange(0, BLOCKS), tl.cdiv(size, BLOCK)
    own = (block >= first) & (block < until) & (block < blocks)
    tops = tl.load(noted + block, mask=own, other=-float("inf"))
    sums = tl.load(noted + BLOCKS + block, mask=own, other=0.0)
    record = noted + 3 * BLOCKS
    highest, edge = tl.load(record + HIGHEST), tl.load(record + EDGE)
    own = own & (tops >= edge)
    masses = tl.where(own, sums * tl.exp(tops - highest), 0.0)
    lost = tl.where(without >= 0, without // BLOCK, -1)  # the block that the left out token is in
    lost = tl.where((edge > -float("inf")) | (share >= 0), block, lost)
    again = own & (block == lost)
    each = tl.min(tl.where(again, block, BLOCKS), 0)
    while each < BLOCKS:
        weights = _weights(logits, stride, width, size, noted, row, heat, without, share, drawn_logits,
                           drawn_stride, drawn_temperature, drawn_lse, draft_ids, each, BLOCKS)
        masses = tl.where(block == each, tl.sum(weights, 0), masses)
        each = tl.min(tl.where(again & (block > each), block, BLOCKS), 0)
    return masses


@triton.jit
def _weights(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, noted: tl.tensor,
             row: tl.tensor, heat: tl.tensor, without: tl.tensor, share: tl.tensor, drawn_logits: tl.tensor,
             drawn_stride: tl.tensor, drawn_temperature: tl.tensor, drawn_lse: tl.tensor,
             draft_ids: tl.tensor, block: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """float32 [BLOCK]: of a block's tokens exp(y - highest) where they are kept and not `without`, or, where
    `share` is not -1, max(share x target - drafter, 0)."""
    record = noted + 3 * BLOCKS
    highest, edge = tl.load(record + HIGHEST), tl.load(record + EDGE)
    last = tl.minimum(tl.load(record + LAST).to(tl.int32, bitcast=True), size - 1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    y = tl.div_rn(numbers(logits + row.to(tl.int64) * stride, ids, ids < width), heat)
    # One bool at a time, since each takes scalar registers of a wave.
    ends = tl.where(y == edge, last, size - 1)
    ends = tl.where(ids == without, -1, ends)
    weights = tl.where(y < edge, 0.0, tl.exp(y - highest))
    weights = tl.where(ids > ends, 0.0, weights)
    if drawn_logits is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if share >= 0:
            own = ids
            if draft_ids is not None:
                own = tl.load(draft_ids + ids, mask=ids < size, other=-1)
            drawn = drawn_logits + row.to(tl.int64) * drawn_stride
            drawn = tl.div_rn(numbers(drawn, own, (own >= 0) & (ids < size)), tl.load(drawn_temperature))
            chances = tl.exp(drawn - tl.load(drawn_lse + row))
            scale = (share / tl.load(record + TOTAL).to(tl.float64)).to(tl.float32)
            weights = tl.maximum(weights * scale - chances, 0.0)
    return weights


@triton.jit
def accepted_block(notes: tl.tensor, slot: tl.tensor, size: tl.tensor, index: tl.tensor, drafted: tl.tensor,
                   weight: tl.tensor, target: tl.tensor, number: tl.tensor, NOTED: tl.constexpr,
                   BLOCKS: tl.constexpr) -> tl.tensor:
    """How many of `drafted` drafts are accepted as a block: `weight` is the run weight of so many drafts as
    its index, `number` decides of these, `target` is the chance of the draft behind them. The masses that are
    left of the rows are NOTED; else a drafter could say one token only."""
    mass = weight * (1 - target)
    if NOTED:
        block = tl.arange(0, BLOCKS)
        for each in range(1, drafted):
            noted = row_of(notes, slot + each, BLOCKS) + 2 * BLOCKS
            left = tl.load(noted + block, mask=block < tl.cdiv(size, BLOCK), other=0.0, cache_modifier=".cg")
            mass = tl.where(index == each, tl.sum(left.to(tl.float64), 0), mass)
    chance = tl.where(mass + 1 > weight, mass / (mass + 1 - weight), 1.0)
    chance = tl.where(index < drafted, chance, weight)
    kept = (index > 0) & (index <= drafted) & (number < chance)
    return tl.max(tl.where(kept, index, 0), 0)
