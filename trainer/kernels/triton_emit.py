"""The last of the Triton kernels of verification: they decide how many drafts of a request are accepted and
draw the token behind them. Of the target's logits they read what is drawn from. """

from __future__ import annotations

import triton
import triton.language as tl

from trainer.kernels.triton_draw import accepted_block, draw, masses_left
from trainer.kernels.triton_parts import (
    ACCEPT,
    EDGE,
    EMIT,
    HIGHEST,
    LAST,
    TOKEN,
    TOTAL,
    numbers,
    row_of,
    uniform,
)

TINY = tl.constexpr(1e-38)


@triton.jit
def emit_best(starts: tl.tensor, drafts: tl.tensor, best: tl.tensor, tokens: tl.tensor, counts: tl.tensor,
              longest: tl.tensor, programs: tl.tensor, PROGRAMS: tl.constexpr, LENGTH: tl.constexpr) -> None:
    """For requests that are all greedy, behind `triton_rows.best_of_blocks`, which had `programs` programs
    for a row. Grid: requests."""
    request, index = tl.program_id(0), tl.arange(0, LENGTH)
    start = tl.load(starts + request)
    length = tl.minimum(tl.load(starts + request + 1) - start, longest)
    inside, part = index < length, tl.arange(0, PROGRAMS)
    slots = request.to(tl.int64) * longest + index
    draft = tl.load(drafts + start + index, mask=inside, other=-1)
    there = inside[:, None] & (part < programs)[None, :]
    both = tl.load(best + slots[:, None] * programs + part[None, :], mask=there, other=-(2 ** 63))
    both = tl.max(both, 1)
    key, token = both >> 32, 0x7FFFFFFF - (both & 0x7FFFFFFF)
    sane = inside & (key > -2139095041) & (key < 2139095040)  # of -inf and of inf
    accepted = tl.min(tl.where(sane & (draft == token), LENGTH, index), 0)
    here = index == accepted
    faulty = tl.sum((here & inside & ~sane).to(tl.int32), 0) > 0
    emitted = tl.max(tl.where(here & sane, token, -1), 0)
    _answer(request, index, draft, accepted, emitted, faulty, tokens, counts, longest)


@triton.jit
def emit(logits: tl.tensor, stride: tl.tensor, width: tl.tensor, size: tl.tensor, starts: tl.tensor,
         drafts: tl.tensor, temperature: tl.tensor, seed: tl.tensor, position: tl.tensor, notes: tl.tensor,
         tokens: tl.tensor, counts: tl.tensor, longest: tl.tensor, drawn_logits: tl.tensor,
         drawn_stride: tl.tensor, drawn_temperature: tl.tensor, drawn_lse: tl.tensor, drawn_logit: tl.tensor,
         draft_ids: tl.tensor, arrivals: tl.tensor, per: tl.tensor, BLOCKS: tl.constexpr,
         LENGTH: tl.constexpr, BLOCK_WISE: tl.constexpr) -> None:
    """For any requests, behind `triton_rows.note_rows`. Grid: requests; where drafts were drawn from
    something, programs of `per` blocks each, of which the last to be done with what is left of its blocks
    draws. They are counted in `arrivals` [B], which are 0 before and after."""
    DRAWN: tl.constexpr = drawn_logits is not None
    request, index = tl.program_id(0), tl.arange(0, LENGTH)
    start = tl.load(starts + request)
    length = tl.minimum(tl.load(starts + request + 1) - start, longest)
    inside, row, heat = index < length, start + index, tl.load(temperature + request)
    draft = tl.load(drafts + row, mask=inside, other=-1)
    slot = request.to(tl.int64) * longest
    record = row_of(notes, slot + index, BLOCKS) + 3 * BLOCKS
    highest = tl.load(record + HIGHEST, mask=inside, other=0.0)
    sane = inside & (highest > -float("inf")) & (highest < float("inf"))
    sampling = (index * 0 + heat) > 0  # the same for all; Triton's interpreter spreads no bool of a float
    sampled = sane & (draft >= 0) & sampling

    # The chance of each draft, of the target and of the drafter.
    y = numbers(logits + row.to(tl.int64) * stride, draft, sampled & (draft < size))
    y = tl.div_rn(y, tl.where(heat > 0, heat, 1.0))
    edge = tl.load(record + EDGE, mask=sampled, other=0.0)
    last = tl.load(record + LAST, mask=sampled, other=0.0).to(tl.int32, bitcast=True)
    total = tl.load(record + TOTAL, mask=sampled, other=1.0).to(tl.float64)
    kept = sampled & (draft < size) & ((y > edge) | ((y == edge) & (draft <= last)))
    target = tl.where(kept, tl.exp(y - highest), 0.0).to(tl.float64) / total
    drafter = target * 0 + 1.0
    if DRAWN:
        drawn = tl.div_rn(tl.load(drawn_logit + row, mask=sampled, other=0.0),
                          tl.load(drawn_temperature + request))
        lse = tl.load(drawn_lse + row, mask=sampled, other=0.0)
        drafter = tl.exp(drawn - lse).to(tl.float64)

    # One by one. In a block, the number that decides of so many drafts is that of the last one's place.
    token = tl.load(record + TOKEN, mask=inside & ~sampling, other=0.0).to(tl.int32, bitcast=True)
    key, first = tl.load(seed + request), tl.load(position + request)
    as_block = sampling & BLOCK_WISE
    number = uniform(key, first + tl.where(as_block, index - 1, index), ACCEPT, tl.where(as_block, index, 0))
    behind = uniform(key, first + index, EMIT, index * 0)  # here: the seed's words need not be kept then
    right = tl.where(sampling, sampled & (number * drafter < target), sane & (draft == token))
    accepted = tl.min(tl.where(right, LENGTH, index), 0)
    faulty = tl.sum(((index == accepted) & inside & ~sane).to(tl.int32), 0) > 0

    drafted, weight = accepted, target * 0 + 1.0  # the run weight of the drafts before each row
    if BLOCK_WISE:
        drafted = tl.where(heat > 0, tl.min(tl.where(draft >= 0, LENGTH, index), 0), 0)
        if heat > 0:
            faulty = tl.sum((inside & (index <= drafted) & ~sane).to(tl.int32), 0) > 0
            drafted = tl.where(faulty, 0, drafted)
            run, ratio = tl.sum(target * 0, 0) + 1.0, target / tl.maximum(drafter, TINY)
            for each in range(drafted):
                run = tl.minimum(run * tl.sum(tl.where(index == each, ratio, 0.0), 0), 1.0)
                weight = tl.where(index == each + 1, run, weight)

    done = drafted >= 0
    if DRAWN:
        # Rows of which something is left: the one behind the accepted drafts, or all that a block drafts.
        if BLOCK_WISE:
            low, high = drafted * 0, drafted
        else:
            low = accepted
            high = accepted + tl.sum(((index == accepted) & sampled).to(tl.int32), 0)
        part, blocks = tl.program_id(1), tl.arange(0, BLOCKS)
        for each in range(low, high):
            noted = row_of(notes, slot + each, BLOCKS)
            share = tl.sum(tl.where(index == each, weight, 0.0), 0)
            left = masses_left(logits, stride, width, size, noted, start + each, heat, low * 0 - 1, share,
                               drawn_logits, drawn_stride, drawn_temperature + request, drawn_lse, draft_ids,
                               part * per, part * per + per, BLOCKS)
            own = (blocks >= part * per) & (blocks < part * per + per)
            tl.store(noted + 2 * BLOCKS + blocks, left, mask=own)
        done = part == 0
        if low < high:
            tl.debug_barrier()  # all that this program stored is there before it says so
            done = tl.atomic_add(arrivals + request, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1
            if done:
                tl.store(arrivals + request, 0)
    if done:
        if BLOCK_WISE:
            whole = accepted_block(notes, slot, size, index, drafted, weight, target, number, DRAWN, BLOCKS)
            accepted = tl.where(heat > 0, whole, accepted)
        here = (index == accepted) & inside
        emitted = tl.max(tl.where(here & sane, token, -1), 0)
        if (heat > 0) & (emitted >= 0) & (faulty == 0):
            without = tl.max(tl.where(here, draft, -1), 0)
            share = tl.sum(tl.where(here, weight, 0.0), 0) * 0 - 1
            if DRAWN:
                share = tl.where(without >= 0, tl.sum(tl.where(here, weight, 0.0), 0), -1.0)
                without = without * 0 - 1
            near = drawn_temperature
            if DRAWN:
                near = drawn_temperature + request
            emitted = draw(logits, stride, width, size, row_of(notes, slot + accepted, BLOCKS),
                           start + accepted, heat, without, share,
                           tl.sum(tl.where(here, behind, 0.0), 0), drawn_logits, drawn_stride,
                           near, drawn_lse, draft_ids, BLOCKS)
        _answer(request, index, draft, accepted, emitted, faulty, tokens, counts, longest)


@triton.jit
def _answer(request: tl.tensor, index: tl.tensor, draft: tl.tensor, accepted: tl.tensor, emitted: tl.tensor,
            faulty: tl.tensor, tokens: tl.tensor, counts: tl.tensor, longest: tl.tensor) -> None:
    """The accepted drafts and, unless it is -1, one token more; see `verification.Verified`."""
    emitted = tl.where(faulty, -1, emitted)
    said = tl.where(index < accepted, draft, tl.where(index == accepted, emitted, -1).to(tl.int64))
    tl.store(tokens + request.to(tl.int64) * longest + index, said, mask=index < longest)
    count = accepted + (emitted >= 0).to(tl.int32)
    tl.store(counts + request, tl.where(faulty, -1 - count, count))
