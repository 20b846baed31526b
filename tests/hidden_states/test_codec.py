"""States -> bytes -> states: bit for bit, or with a bounded error in eight bits; which rows are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_states import equal, random_states
from tiny import dflash, random_samples, states_of
from torch import Tensor

from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.hidden_states import codec as codecs
from trainer.hidden_states.codec import ALIGNMENT, ROW_ERROR, Codec, bad_rows, dequantize, quantize, sound
from trainer.records import HiddenStates, Sample
from trainer.target import Target

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = Codec("native", torch.bfloat16, (1, 3), 8, "supervised")
SMALL = replace(PLAIN, storage="float8_e4m3fn")

made_codecs = st.builds(
    Codec, st.sampled_from(["native", "float8_e4m3fn"]), st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True).map(sorted).map(tuple),
    st.integers(1, 40), st.sampled_from(["supervised", "all", "none"]))
made_samples = st.builds(
    lambda name, mask: Sample(name, tuple(range(7, 7 + len(mask))), tuple(mask)),
    st.text(min_size=1, max_size=12), st.lists(st.booleans(), min_size=1, max_size=40))


def decoded(codec: Codec, sample: Sample, states: HiddenStates) -> HiddenStates:
    """Through the bytes, each section on its own and at an aligned place, as a reader finds it."""
    sections = codec.encode(sample, states)
    kept = codec.kept(sample.loss_mask)
    places = codec.places(len(sections[0]), len(sample.tokens), int(kept.sum()))
    stored = torch.zeros(places[-1][1], dtype=torch.uint8)
    for (start, end), section in zip(places, sections, strict=True):
        assert end - start == len(section) and section.dtype == np.uint8
        stored[start:end] = torch.from_numpy(section.copy())
    taps = torch.empty(len(sample.tokens), len(codec.layers), codec.hidden, dtype=codec.dtype)
    last = torch.zeros(len(sample.tokens), codec.hidden, dtype=codec.dtype)
    for place, (start, end) in enumerate(places[3:-1]):
        codec.decode(stored[start:end], taps[:, place:place + 1])
    together = torch.empty_like(taps)
    codec.decode(stored[places[3][0]:places[-2][1]], together)
    assert torch.equal(together, taps), "sections that follow each other in one call"
    rows = torch.empty(int(kept.sum()), 1, codec.hidden, dtype=codec.dtype)
    codec.decode(stored[slice(*places[-1])], rows)
    last[kept] = rows[:, 0]
    return HiddenStates(taps.flatten(1), last)


@settings(max_examples=150, deadline=None)
@given(made_codecs, made_samples)
def test_a_source_that_does_not_store_gives_the_same_bits(codec: Codec, sample: Sample) -> None:
    states = random_states(codec, sample)
    found = decoded(codec, sample, states)
    assert equal(found, codec.roundtrip(states, sample.loss_mask))
    kept = codec.kept(sample.loss_mask)
    assert not found.last[~kept].any()
    if codec.storage == "native":
        assert torch.equal(found.taps, states.taps) and torch.equal(found.last[kept], states.last[kept])
    again = codec.roundtrip(found, sample.loss_mask)
    assert torch.equal(again.last != 0, found.last != 0)


@settings(max_examples=150, deadline=None)
@given(made_codecs, st.integers(1, 50), st.integers(1, 300), st.integers(0, 300))
def test_sections_follow_each_other_aligned_and_without_overlap(codec: Codec, id_bytes: int, tokens: int,
                                                                last: int) -> None:
    places = codec.places(id_bytes, tokens, last)
    assert len(places) == len(codec.sections) == len(codec.layers) + 4
    end = 0
    for start, after in places:
        assert end <= start <= after and start - end < ALIGNMENT
        assert start == after or start % ALIGNMENT == 0
        end = after
    width = codec.hidden * codec.dtype.itemsize if codec.storage == "native" else codec.hidden + 2
    sizes = [after - start for start, after in places[3:]]
    assert sizes == [*[tokens * width] * len(codec.layers), last * width]


@pytest.mark.parametrize(("last_rows", "expected"), [
    ("supervised", [False, True, True, False, True, False]), ("all", [True] * 6), ("none", [False] * 6)])
def test_a_row_is_kept_where_the_next_token_is_supervised(last_rows: str, expected: list[bool]) -> None:
    codec = replace(PLAIN, last_rows=last_rows)
    assert codec.kept([True, False, True, True, False, True]).tolist() == expected
    assert codec.kept([True]).tolist() == [last_rows == "all"] and codec.kept([]).tolist() == []


# eight bits


def row_errors(rows: Tensor) -> Tensor:
    """|row - stored row| / |row|, in float64."""
    stored = dequantize(*quantize(rows), torch.empty_like(rows))
    assert stored.dtype == rows.dtype
    return (stored.double() - rows.double()).norm(dim=-1) / rows.double().norm(dim=-1)


numbers = st.floats(-1, 1, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40).filter(any), st.integers(-60, 60),
       st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_is_off_by_no_more_than_the_bound(values: list[float], exponent: int,
                                                dtype: torch.dtype) -> None:
    """From 1e-18 to 1e18, with zeros and with any spread inside the row."""
    rows = (torch.tensor([values]) * 2.0 ** exponent).to(dtype)
    assert float(row_errors(rows)) <= ROW_ERROR


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0 ** -100, 2.0 ** 120, width=32))
def test_a_scale_is_the_smallest_that_does_not_overflow(largest: float) -> None:
    scales, codes = quantize(torch.tensor([[largest, -largest, largest / 3]]))
    assert scales.dtype == torch.bfloat16 and codes.dtype == torch.float8_e4m3fn
    assert torch.isfinite(codes.float()).all() and codes.float().abs().max() <= 448
    assert float(scales) >= largest / 448 * (1 - 2.0 ** -23)
    below = (scales.view(torch.int16) - 1).view(torch.bfloat16)
    assert float(below) < largest / 448 * (1 + 2.0 ** -23)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 3, 40])
@pytest.mark.parametrize("scale", [2.0 ** -126, 2.0 ** -9, 0.75, 126.0, 2.0 ** 100])
def test_every_code_has_its_value(hidden: int, scale: float, dtype: torch.dtype,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a writer stores, by moving bits and by PyTorch, in blocks and parts of them, in layers that
    lie apart and rows that are interleaved. The two codes of no number are left to the checks."""
    monkeypatch.setattr(codecs, "BLOCK", 100 * hidden)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every & 0x7F != 0x7F].repeat(2).view(2, 254, 1).expand(2, 254, hidden).contiguous()
    codes = torch.cat([every, every.flip(1)], dim=1)[:, :254].view(torch.float8_e4m3fn)
    scales = torch.full((2, 254), scale).bfloat16()
    scales[:, ::2] *= 0.5 if scale > 1e-30 else 1
    out = torch.empty(254, 2, hidden, dtype=dtype)
    found = dequantize(scales, codes, out.permute(1, 0, 2))
    expected = (codes.float() * scales.float()[..., None]).to(dtype)
    assert torch.equal(found, expected) and torch.equal(out, expected.permute(1, 0, 2))
    assert torch.equal(dequantize(scales[0], codes[0], torch.empty(254, hidden, dtype=dtype)), expected[0])


def test_what_is_no_number_stays_none() -> None:
    """Also beside rows that are sound: a source that does not store passes its states through as well."""
    rows = torch.ones(4, 8)
    rows[1, 3], rows[2, 5] = float("nan"), float("inf")
    found = dequantize(*quantize(rows), torch.empty(4, 8))
    assert found.isfinite().all(-1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_rows_are_off_by_less_than_four_percent(dtype: torch.dtype) -> None:
    rows = torch.randn(500, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    errors = row_errors(rows)
    assert 0.015 < errors.mean() < 0.028 and errors.max() < 0.04
    rows[:, 7] *= 3000  # a channel that dwarfs the rest, as the first layers of many targets have
    small = torch.arange(576) != 7
    stored = dequantize(*quantize(rows), torch.empty_like(rows)).double()[:, small]
    expected = rows.double()[:, small]
    off = (stored - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert off.max() < 0.04, "the small channels keep their digits beside the large one"


@pytest.mark.parametrize("hidden", [576, 2048])
def test_eight_bits_take_half_the_bytes(hidden: int) -> None:
    """5 layers and the last state, 100 to 300 tokens, a page of 4096 bytes at the end included."""
    eight, native = (Codec(storage, torch.bfloat16, (1, 2, 3, 4, 5), hidden, "supervised")
                     for storage in ("float8_e4m3fn", "native"))
    for tokens in range(100, 301):
        sizes = [-(-codec.places(20, tokens, tokens * 6 // 10)[-1][1] // 4096) * 4096
                 for codec in (eight, native)]
        assert sizes[0] <= 0.51 * sizes[1], tokens


# rows that hold nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("part", "columns", "value"), [
    ("taps", slice(None), 0.0), ("taps", slice(0, 8), 0.0), ("taps", slice(0, 8), -0.0),
    ("taps", slice(3, 4), float("nan")), ("taps", slice(9, 10), float("-inf")),
    ("last", slice(None), 0.0), ("last", slice(0, 1), float("inf"))])
def test_bad_rows_are_counted_in_every_layer(dtype: torch.dtype, part: str, columns: slice,
                                             value: float) -> None:
    sample = random_samples((6,), prompt=2)[0]
    good = random_states(replace(PLAIN, dtype=dtype), sample)
    every = torch.ones(6, dtype=torch.bool)
    assert bad_rows(good, every) == 0
    for row in (1, 4):
        getattr(good, part)[row, columns] = value
    assert bad_rows(good, every) == 2
    assert bad_rows(good, torch.arange(6) > 1) == (1 if part == "last" else 2), "only kept rows of the last"


def test_a_single_zero_is_not_a_bad_row() -> None:
    rows = torch.ones(3, 8)
    rows[1, :7] = 0.0
    rows[2] = torch.finfo(torch.float32).max
    assert sound(rows).all() and sound(rows.bfloat16()[:2]).all() and sound(torch.ones(0, 8)).shape == (0,)


@pytest.mark.parametrize("codec", [PLAIN, SMALL])
def test_stored_rows_are_judged_by_their_bits(codec: Codec) -> None:
    rows = torch.randn(5, 8).bfloat16()
    assert codec.unsound(codec._pack(rows), 5) == 0
    for value in (0.0, float("nan"), float("inf")):
        broken = rows.clone()
        broken[2] = value
        assert codec.unsound(codec._pack(broken), 5) == 1
    if codec.storage != "native":
        raw = codec._pack(rows)
        raw[:2].view(torch.bfloat16)[0] = -1.0
        assert codec.unsound(raw, 5) == 1, "a scale is positive"


@pytest.mark.parametrize(("taps", "last"), [((5, 16), (6, 8)), ((6, 8), (6, 8)), ((6, 16), (5, 8)),
                                            ((7, 16), (7, 8))])
def test_states_of_another_shape_are_refused(taps: tuple[int, int], last: tuple[int, int]) -> None:
    """Fewer rows than tokens is what a cache of prefixes gives."""
    sample = random_samples((6,), prompt=2)[0]
    with pytest.raises(UserError, match=r"returned (taps|last) \[\d, \d+\] .* sample s0, expected \[6, "):
        PLAIN.check(sample, HiddenStates(torch.ones(taps).bfloat16(), torch.ones(last).bfloat16()))
    with pytest.raises(UserError, match="in torch.float32 for sample s0, expected .* in torch.bfloat16"):
        PLAIN.check(sample, HiddenStates(torch.ones(6, 16), torch.ones(6, 8)))
    PLAIN.check(sample, random_states(PLAIN, sample))


def test_a_head_names_every_section_before_the_layers() -> None:
    assert PLAIN.sections == ("id", "tokens", "mask", "layer 1", "layer 3", "last")
    assert PLAIN.sections[:3] == codecs.HEAD


# what losses read


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_a_loss_reads_no_row_that_is_not_kept(tiny_target: Target, objective: str) -> None:
    """Zeros there change no bit of the sums; their gradients neither."""
    samples = [Sample("a", tuple(range(40)), tuple(8 <= place < 20 or place > 30 for place in range(40))),
               Sample("b", tuple(range(50, 80)), tuple(place > 3 for place in range(30)))]
    states = states_of(tiny_target, samples, [1, 2])
    codec = Codec("native", torch.float32, (1, 2), 64, "supervised")
    found = []
    for given_states in (states, [codec.roundtrip(state, sample.loss_mask)
                                  for state, sample in zip(states, samples, strict=True)]):
        drafter = dflash(tiny_target, objective=objective, anchors=60)
        step = drafter.loss(collate(samples, given_states, seed=1, device="cpu", tokens=80))
        step.loss_sum.backward()
        grads = [each.grad for each in drafter.parameters() if each.grad is not None]
        found.append((step, grads))
    (one, first), (two, second) = found
    assert not torch.equal(states[0].last, codec.roundtrip(states[0], samples[0].loss_mask).last)
    assert torch.equal(one.loss_sum, two.loss_sum) and torch.equal(one.count, two.count)
    assert all(torch.equal(one.ratios[name].total, two.ratios[name].total) for name in one.ratios)
    assert len(first) > 10 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
