"""What storage float8_e4m3fn promises of a whole cache: half the bytes, and no more loss than stated."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_states import extract, make, random_states
from tiny import random_samples, states_of

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import ROW_ERROR, Codec
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates, Sample
from trainer.target import Target

SMOLLM2 = Manifest("target", "template", [2, 9, 16, 23, 28], 576, "bfloat16", "native", "supervised", "tests")


def test_a_whole_folder_takes_half_the_bytes(tmp_path: Path) -> None:
    """At the shape of SmolLM2 and lengths as in its recipe, with everything that lies in the folder: tokens,
    masks, scales, index, manifest, room up to the next section and page."""
    draw = random.Random(0)
    samples = random_samples([draw.randint(60, 330) for _ in range(60)], prompt=60)
    sizes = {}
    for storage in ("native", "float8_e4m3fn"):
        manifest = replace(SMOLLM2, storage=storage)
        folder = tmp_path / storage
        folder.mkdir()
        with ShardWriter(folder, manifest, 1 << 24) as writer:
            for sample in samples:
                writer.append(sample, random_states(writer.codec, sample))
        sizes[storage] = sum(path.stat().st_size for path in folder.iterdir())
    assert 0.5 < sizes["float8_e4m3fn"] / sizes["native"] <= 0.51, sizes


def test_every_row_of_a_real_target_is_as_near_as_promised(tiny_target: Target, tmp_path: Path) -> None:
    """Stored from float32 and read back, against what the target computed."""
    samples = random_samples((40, 23, 57))
    stage = make("offline", tiny_target, [0, 1, 2, 3], storage="float8_e4m3fn", last_rows="all")
    extract(stage, tmp_path / "states", samples)
    reader = ShardReader(tmp_path / "states")
    for sample, states in zip(samples, states_of(tiny_target, samples, [0, 1, 2, 3]), strict=True):
        found = reader.get(sample)
        for one, other in ((found.taps, states.taps), (found.last, states.last)):
            rows, expected = (each.double().unflatten(-1, (-1, 64)) for each in (one, other))
            off = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert 0 < off.max() < 0.04 < ROW_ERROR


def test_states_in_float32_do_not_become_bfloat16(tiny_target: Target, tmp_path: Path) -> None:
    stage = make("offline", tiny_target, [1, 2], dtype="bfloat16")  # and its engine computes in float32
    with pytest.raises(UserError, match=r"returned taps \[40, 128\] in torch.float32 for sample s0, expected "
                                        r"\[40, 128\] in torch.bfloat16: .* hidden_states.dtype"):
        extract(stage, tmp_path / "states", random_samples((40, 23)))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["float32", "bfloat16"]), st.integers(-149, 127),
       st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4).filter(any))
def test_a_row_is_refused_or_as_near_as_promised(dtype: str, exponent: int, values: list[float]) -> None:
    """Over the whole range of numbers, subnormal ones and the largest included."""
    codec = Codec("float8_e4m3fn", getattr(torch, dtype), (1,), 4, "all")
    sample = Sample("one", (7,), (True,))
    row = (torch.tensor([values], dtype=torch.float64) * 2.0 ** exponent).to(codec.dtype)
    states = HiddenStates(row, torch.ones(1, 4, dtype=codec.dtype))
    if not row.any():
        return
    try:
        codec.check(sample, states)
    except UserError as error:
        assert "1 rows of hidden states of sample one would lose more than 6.65%" in str(error)
        largest = float(row.abs().max())
        assert largest < 6e-36 or largest > 3.3e38
        return
    found = codec.roundtrip(states, sample.loss_mask).taps.double()
    assert float((found - row.double()).norm() / row.double().norm()) <= ROW_ERROR


def test_what_would_overflow_is_refused() -> None:
    """In float16, whose range a target can reach."""
    codec = Codec("float8_e4m3fn", torch.float16, (1,), 4, "all")
    sample = Sample("one", (7,), (True,))
    for largest, fine in ((64_900.0, True), (65_504.0, False)):
        states = HiddenStates(torch.tensor([[largest, 1, 2, 3]]).half(), torch.ones(1, 4).half())
        if fine:
            codec.check(sample, states)
            assert codec.roundtrip(states, sample.loss_mask).taps.isfinite().all()
        else:
            with pytest.raises(UserError, match=r"from 5.27e-36 to 6.5e\+04, found less or more; set "
                                                "hidden_states.storage=native"):
                codec.check(sample, states)
