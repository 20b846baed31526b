"""Stored hidden states: how samples are cut into shards, and that no damage goes unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import random_samples

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.shards import ShardReader, bad_rows, describe_shards, plan, shard_path, write_shard
from trainer.records import HiddenStates

SAMPLES = random_samples((9, 4, 7, 6), prompt=2)
HIDDEN, LAYERS = 8, [1, 3]


def states(seed: int, rows: int) -> HiddenStates:
    generator = torch.Generator().manual_seed(seed)
    return HiddenStates(torch.randn(rows, 2 * HIDDEN, generator=generator).bfloat16(),
                        torch.randn(rows, HIDDEN, generator=generator).bfloat16())


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    planned = plan(SAMPLES, 13)
    for number, samples in enumerate(planned):
        write_shard(tmp_path, number, samples, [states(len(s.tokens), len(s.tokens)) for s in samples])
    where, described = describe_shards(tmp_path, planned)
    Manifest("target", "template", LAYERS, "bfloat16", 26, where, described).write(tmp_path)
    return tmp_path


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 40))
def test_shards_hold_samples_whole_and_in_order(lengths: list[int], tokens: int) -> None:
    samples = random_samples(lengths)
    planned = plan(samples, tokens)
    assert [sample for shard in planned for sample in shard] == samples
    for shard in planned:
        assert len(shard) == 1 or sum(len(sample.tokens) for sample in shard) <= tokens


def test_what_was_written_comes_back_bit_for_bit(stored: Path) -> None:
    assert [path.name for path in sorted(stored.glob("shard-*"))] == ["shard-00000.safetensors",
                                                                      "shard-00001.safetensors"]
    reader = ShardReader(stored)
    for sample in reversed(SAMPLES):
        expected, found = states(len(sample.tokens), len(sample.tokens)), reader.get(sample)
        assert torch.equal(found.taps, expected.taps) and torch.equal(found.last, expected.last)
        assert found.taps.dtype == torch.bfloat16
    reader.close()


@pytest.mark.parametrize("damage", ["cut", "nan", "zeros", "one bit", "gone"])
def test_a_damaged_shard_is_named(stored: Path, damage: str) -> None:
    path = shard_path(stored, 1)
    content = path.read_bytes()
    tensors = load_file(path)
    if damage == "cut":
        path.write_bytes(content[:-100])
    elif damage == "one bit":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "gone":
        path.unlink()
    else:
        wrong = torch.full_like(tensors["taps"], float("nan") if damage == "nan" else 0)
        save_file(tensors | {"taps": wrong}, path)
    reader = ShardReader(stored)
    reader.get(SAMPLES[0])
    with pytest.raises(UserError, match=f"{path} is (missing|damaged).* remove {stored} and extract again"):
        reader.get(SAMPLES[2])


def test_states_of_other_tokens_are_refused(stored: Path) -> None:
    reader = ShardReader(stored)
    changed = replace(SAMPLES[1], tokens=(1, *SAMPLES[1].tokens[1:]))
    longer = replace(SAMPLES[1], tokens=(*SAMPLES[1].tokens, 5))
    for sample in (changed, longer):
        with pytest.raises(UserError, match=f"{shard_path(stored, 0)} holds other tokens than sample s1"):
            reader.get(sample)
    with pytest.raises(UserError, match="has no hidden states of sample s9"):
        reader.get(replace(SAMPLES[1], id="s9"))


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"target": "only"})])
def test_a_manifest_that_cannot_be_read_is_named(stored: Path, content: str | None) -> None:
    path = stored / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"{path} is missing or not readable"):
        ShardReader(stored)


@pytest.mark.parametrize(("part", "columns", "value"), [
    ("taps", slice(None), 0.0), ("taps", slice(0, HIDDEN), 0.0), ("taps", slice(3, 4), float("nan")),
    ("last", slice(None), 0.0), ("last", slice(0, 1), float("inf"))])
def test_bad_rows_are_counted_in_every_layer(part: str, columns: slice, value: float) -> None:
    good = states(0, 6)
    assert bad_rows(good) == 0
    getattr(good, part)[1, columns] = value
    getattr(good, part)[4, columns] = value
    assert bad_rows(good) == 2


def test_a_single_zero_is_not_a_bad_row() -> None:
    good = states(0, 6)
    good.taps[2, 3] = 0.0
    assert bad_rows(good) == 0
