"""What the Triton kernels of verification share: sizes, random numbers, the order of numbers, reading of
logits and drawing. Nothing knows how wide a wave is, and nothing is written for one maker of devices.

The numbers are those of `philox`, word for word. """

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # ids of a logical block: sampling takes a block first, then a token in it
CELL = tl.constexpr(64)  # ids of which the largest logit says whether a filter has to look at them
KEPT = tl.constexpr(1024)  # of a row, tokens that a filter works on at once
RECORD = tl.constexpr(8)  # numbers noted of a row behind those of its blocks
HIGHEST, TOTAL, EDGE, LAST, TOKEN = (tl.constexpr(index) for index in range(5))
ACCEPT, EMIT = tl.constexpr(0), tl.constexpr(1)  # streams


@triton.jit
def slot_of(request: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64: where a workspace has a row of a request, in kernels whose grid has the rows of one next."""
    return request.to(tl.int64) * tl.num_programs(1) + index


@triton.jit
def row_of(notes: tl.tensor, slot: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Where the notes of a row are: float32, of BLOCKS blocks the largest logit, the sum of exp(logit - it),
    for greedy requests the largest one's place, what is left of the block; then the row's record."""
    return notes + slot * (3 * BLOCKS + RECORD)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor, stream: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """Numbers in [0, 1) with 53 bits, float64, as `philox.uniform` gives them: Philox4x32-10 keyed by the
    seed, of positions and turns int64 of one shape."""
    a, b = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c, d = a * 0 + stream, turn.to(tl.uint32)
    left, right = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ left
        c = (first >> 32).to(tl.uint32) ^ d ^ right
        b, d = second.to(tl.uint32), first.to(tl.uint32)
        left, right = left + 0x9E3779B9, right + 0xBB67AE85
    return ((a >> 5).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def key_of(value: tl.tensor) -> tl.tensor:
    """int32 that rise with float32 values, the same for both zeros."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def numbers(logits: tl.tensor, ids: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """float32 logits at ids, -inf for what is not inside and for what is not a number."""
    values = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(values == values, values, -float("inf"))


@triton.jit
def crossing(weights: tl.tensor, place: tl.tensor, SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first index of float64 weights [SIZE] that takes their sum beyond `place`, by rounding the last one
    that is not 0; and the sum before it."""
    running, index = tl.cumsum(weights, 0), tl.arange(0, SIZE)
    reached = tl.where(weights > 0, running, -1.0)  # one bool at a time: each takes scalar registers
    beyond = tl.min(tl.where(reached > place, index, SIZE), 0)
    last = tl.max(tl.where(reached > 0, index, 0), 0)
    chosen = tl.where(beyond < SIZE, beyond, last)
    return chosen, tl.sum(tl.where(index == chosen, running - weights, 0.0), 0)
