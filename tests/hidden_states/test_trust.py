"""No wrong state reaches training: one test for every way in which a cache can be wrong.

Each cache was extracted by the stage from a real (tiny) target, through its real engine, and then damaged.
`learn` is what training does with it, `adopt` what the stage of another run does with it before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_states import LAYERS, SAMPLES, SMALL_SHARD, WIDTH, change, extract, fill, flip, index_of, make
from tiny import copied, states_of, uneven_norms

from trainer.errors import GateFailed, UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec, token_bytes
from trainer.hidden_states.shards import shard_path
from trainer.records import HiddenStates
from trainer.target import Target
from trainer.target_head import load_target_head


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With norms that show when they are taken twice."""
    return copied(tiny_target, tmp_path_factory.mktemp("trusted") / "target", uneven_norms)


@pytest.fixture(scope="module")
def extracted(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trusted") / "states"
    extract(make("offline", target, LAYERS, runtime={"shard_gib": SMALL_SHARD}), folder)
    return folder


@pytest.fixture
def cache(extracted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(extracted, tmp_path / "cache"))


def learn(target: Target, folder: Path, layers: list[int] = LAYERS) -> None:
    """All that training wants to know of a cache, and every row of it."""
    Manifest.read(folder).require(folder, layers=layers, last=True, target=target.identity,
                                  template=target.template_hash)
    source = make("offline", target, layers).source(folder=folder, layers=layers)
    for sample in SAMPLES:
        source.get(sample)


def adopt(target: Target, folder: Path, out: Path) -> None:
    extract(make("offline", target, LAYERS, path=str(folder)), out)
    learn(target, out)


def test_the_cache_itself_is_taken(target: Target, cache: Path, tmp_path: Path) -> None:
    learn(target, cache)
    adopt(target, cache, tmp_path / "out/states")


def refused(target: Target, folder: Path, said: str, layers: list[int] = LAYERS) -> None:
    with pytest.raises(UserError, match=said) as caught:
        learn(target, folder, layers)
    assert "\n" not in str(caught.value)


def again(folder: Path) -> str:
    return f"; remove {re.escape(str(folder))} and run the stage hidden_states again$"


def test_truncated(target: Target, cache: Path) -> None:
    record = index_of(cache).find("s4")
    path = shard_path(cache, record.shard)
    os.truncate(path, record.end - 10)
    refused(target, cache, f"^{path} is truncated: expected at least {record.end} bytes, found "
                           f"{record.end - 10}" + again(cache))


def test_bit_flipped(target: Target, cache: Path) -> None:
    path = change(cache, "s2", "layer 2", flip(1000))
    refused(target, cache, f"^{path}, sample s2: section 'layer 2' is damaged: expected checksum [0-9a-f]"
                           "{16}, found [0-9a-f]{16}" + again(cache))


@pytest.mark.parametrize("values", [b"\xff", b"\0"], ids=["NaN", "all zero"])
def test_rows_of_nothing(target: Target, cache: Path, values: bytes) -> None:
    """With checksums that fit."""
    row = WIDTH["native"]
    path = change(cache, "s1", "layer 3", fill(5 * row, 6 * row, values), sealed=True)
    refused(target, cache, f"^{path}, sample s1: section 'layer 3' holds rows that are all zero or not "
                           "finite: expected none, found 1 of 23" + again(cache))


def test_wrong_tokens(target: Target, cache: Path) -> None:
    tokens = (*SAMPLES[3].tokens[:-1], 319)
    path = change(cache, "s3", "tokens", fill(0, 4 * len(tokens), token_bytes(tokens)), sealed=True)
    refused(target, cache, f"^{path} holds other tokens than sample s3: expected {SAMPLES[3].tokens[-1]} at "
                           "position 30, found 319" + again(cache))


def test_wrong_layers_by_name(target: Target, cache: Path) -> None:
    """As many as are there, and one of them is another."""
    refused(target, cache, r"reads layers \[0, 2, 3\] but the hidden states hold layers \[1, 2, 3\] "
                           rf"\({cache}/manifest.json\), so \[0\] are missing", [0, 2, 3])


def test_wrong_target_and_template(target: Target, cache: Path, tmp_path: Path) -> None:
    other = copied(target, tmp_path / "other", lambda tensors: [each.add_(1) for each in tensors.values()])
    refused(other, cache, f"^{cache}/manifest.json holds hidden states of another target: expected "
                          f"{other.identity}, found {target.identity}" + again(cache))
    thinking = replace(target, template={"enable_thinking": True})
    refused(thinking, cache, f"^{cache}/manifest.json holds hidden states of another chat template: expected "
                             f"{thinking.template_hash}, found {target.template_hash}" + again(cache))


def one_layer_early(target: Target, states: list[HiddenStates]) -> list[HiddenStates]:
    """Ids counted from another layer, as "0-based" and "after" are mixed up."""
    early = states_of(target, SAMPLES, [layer - 1 for layer in LAYERS])
    return [HiddenStates(other.taps, state.last) for other, state in zip(early, states, strict=True)]


def other_order(target: Target, states: list[HiddenStates]) -> list[HiddenStates]:
    return [HiddenStates(torch.cat(state.taps.chunk(3, dim=-1)[::-1], dim=-1), state.last)
            for state in states]


def normed(target: Target, states: list[HiddenStates]) -> list[HiddenStates]:
    head = load_target_head(target.folder, target.config)
    return [HiddenStates(state.taps, head.normed(state.last)) for state in states]


def last_one_early(target: Target, states: list[HiddenStates]) -> list[HiddenStates]:
    return [HiddenStates(state.taps, other.taps)
            for state, other in zip(states, states_of(target, SAMPLES, [2]), strict=True)]


Wrong = Callable[[Target, list[HiddenStates]], list[HiddenStates]]
WRONG: dict[Wrong, str] = {one_layer_early: "cosine_layer_1", other_order: "cosine_layer_1",
                           normed: "top1_agreement", last_one_early: "top1_agreement"}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_content_under_a_right_name(target: Target, cache: Path, tmp_path: Path, wrong: Wrong) -> None:
    """A manifest that promises what the bytes do not hold; all checksums fit. No reader can see it, so the
    gates of the stage must."""
    codec = Codec.of(Manifest.read(cache))
    right = states_of(target, SAMPLES, LAYERS)
    for sample, states in zip(SAMPLES, wrong(target, right), strict=True):
        for name, part in zip(codec.sections, codec.encode(sample, states), strict=True):
            if name.startswith("layer") or name == "last":
                change(cache, sample.id, name, fill(0, len(part), part.tobytes()), sealed=True, same=True)
    learn(target, cache)
    out = tmp_path / "out/states"
    with pytest.raises(GateFailed, match=rf"gate {WRONG[wrong]} failed: -?0\.\d+, must be >= 0.99; likely "
                                         f"cause: .*; the states lie in {out}: its files are those of "
                                         f"{cache}: take a sound copy of it or leave hidden_states.path out, "
                                         f"remove {out} and run") as caught:
        adopt(target, cache, out)
    assert "\n" not in str(caught.value)
