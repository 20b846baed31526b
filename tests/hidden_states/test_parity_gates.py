"""The start-up gates see every way in which states can be the wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import copied, random_samples, states_of, uneven_norms

from trainer.errors import GateFailed
from trainer.gates import Gate, require
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.parity import parity_gates
from trainer.records import HiddenStates, Sample
from trainer.target import Target
from trainer.target_head import load_target_head

SAMPLES = random_samples((30, 45, 60))
LAYERS = [0, 2, 3]
ALL = Codec("native", torch.float32, tuple(LAYERS), 64, "all")


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target", uneven_norms)


@pytest.fixture(scope="module")
def states(target: Target) -> dict[str, HiddenStates]:
    return dict(zip((sample.id for sample in SAMPLES), states_of(target, SAMPLES, LAYERS), strict=True))


def gates(target: Target, get: Callable[[Sample], HiddenStates], codec: Codec = ALL) -> list[Gate]:
    return parity_gates(target, SAMPLES, get, codec, torch.float32, "cpu")


def failing(target: Target, get: Callable[[Sample], HiddenStates], codec: Codec = ALL) -> set[str]:
    return {gate.name for gate in gates(target, get, codec) if not gate.passed}


def test_the_target_s_own_states_pass(target: Target, states: dict[str, HiddenStates]) -> None:
    found = gates(target, lambda sample: states[sample.id])
    assert [gate.name for gate in found] == ["top1_agreement", *(f"cosine_layer_{layer}" for layer in LAYERS)]
    assert found[0].value == 1.0 and all(gate.value > 0.99999 for gate in found)
    assert set(require(found)) == {gate.name for gate in found}


def test_layer_ids_that_are_off_by_one_fail(target: Target, states: dict[str, HiddenStates]) -> None:
    early = dict(zip(states, states_of(target, SAMPLES, [0, 1, 2]), strict=True))
    assert failing(target, lambda sample: HiddenStates(early[sample.id].taps, states[sample.id].last)) == \
        {"cosine_layer_2", "cosine_layer_3"}


def test_layers_in_another_order_fail(target: Target, states: dict[str, HiddenStates]) -> None:
    def swapped(sample: Sample) -> HiddenStates:
        first, second, third = states[sample.id].taps.chunk(3, dim=-1)
        return HiddenStates(torch.cat([first, third, second], dim=-1), states[sample.id].last)

    assert failing(target, swapped) == {"cosine_layer_2", "cosine_layer_3"}


def test_a_last_state_that_is_one_layer_early_fails(target: Target, states: dict[str, HiddenStates]) -> None:
    early = dict(zip(states, states_of(target, SAMPLES, [2]), strict=True))
    assert "top1_agreement" in failing(
        target, lambda sample: HiddenStates(states[sample.id].taps, early[sample.id].taps))


def test_a_last_state_that_is_already_normed_fails(target: Target, states: dict[str, HiddenStates]) -> None:
    head = load_target_head(target.folder, target.config)
    assert "top1_agreement" in failing(
        target, lambda sample: HiddenStates(states[sample.id].taps, head.normed(states[sample.id].last)))


def test_rows_that_are_shifted_fail(target: Target, states: dict[str, HiddenStates]) -> None:
    def shifted(sample: Sample) -> HiddenStates:
        return HiddenStates(states[sample.id].taps.roll(1, 0), states[sample.id].last.roll(1, 0))

    assert failing(target, shifted) == {"top1_agreement", "cosine_layer_0", "cosine_layer_2"}


def test_a_single_row_that_is_not_a_number_fails(target: Target, states: dict[str, HiddenStates]) -> None:
    def broken(sample: Sample) -> HiddenStates:
        taps = states[sample.id].taps.clone()
        taps[3, 70] = float("nan")
        return HiddenStates(taps, states[sample.id].last)

    assert failing(target, broken) == {"cosine_layer_2"}
    with pytest.raises(GateFailed,
                       match="gate cosine_layer_2 failed: -1, must be >= 0.99; likely cause: the states "
                                         "stored as layer 2"):
        require(gates(target, broken))


def test_a_head_that_is_read_wrongly_fails(target: Target, states: dict[str, HiddenStates],
                                           tmp_path: Path) -> None:
    """The states are right, but the head in the folder has another norm than the model that gave them."""
    other = copied(target, tmp_path / "other", lambda tensors: tensors["model.norm.weight"].copy_(
        tensors["model.norm.weight"].flip(0)))
    assert failing(other, lambda sample: states[sample.id]) == set(), "both read the same folder"
    head = load_target_head(target.folder, target.config)
    wrong = load_target_head(other.folder, other.config)
    last = states["s0"].last
    assert (head.logits(last).argmax(-1) == wrong.logits(last).argmax(-1)).float().mean() < 0.9


@pytest.mark.parametrize("storage", ["native", "float8_e4m3fn"])
@pytest.mark.parametrize("last_rows", ["supervised", "all", "none"])
def test_rows_that_are_not_kept_are_not_judged(target: Target, states: dict[str, HiddenStates], storage: Any,
                                               last_rows: Any) -> None:
    """They come back as zeros, which no head and no cosine could agree with."""
    codec = replace(ALL, storage=storage, last_rows=last_rows)
    found = gates(target, lambda sample: codec.roundtrip(states[sample.id], sample.loss_mask), codec)
    assert all(gate.passed for gate in found)
    assert ("top1_agreement" in {gate.name for gate in found}) == (last_rows != "none")
    if last_rows != "all":
        zeros = {name: HiddenStates(each.taps, torch.zeros_like(each.last)) for name, each in states.items()}
        failed = failing(target, lambda sample: zeros[sample.id], codec)
        assert failed == ({"top1_agreement", "cosine_layer_3"} if last_rows == "supervised" else set())


@pytest.mark.parametrize("last_rows", ["supervised", "none"])
def test_the_last_layer_is_judged_without_the_last_state(target: Target, states: dict[str, HiddenStates],
                                                         last_rows: Any) -> None:
    early = dict(zip(states, states_of(target, SAMPLES, [0, 2, 2]), strict=True))
    assert "cosine_layer_3" in failing(
        target, lambda sample: HiddenStates(early[sample.id].taps, states[sample.id].last),
        replace(ALL, last_rows=last_rows))


def test_a_wrong_state_fails_in_eight_bits_as_well(target: Target, states: dict[str, HiddenStates]) -> None:
    codec = replace(ALL, storage="float8_e4m3fn", last_rows="supervised")
    head = load_target_head(target.folder, target.config)
    early = dict(zip(states, states_of(target, SAMPLES, [2]), strict=True))
    for wrong in (lambda name: head.normed(states[name].last), lambda name: early[name].taps):
        assert "top1_agreement" in failing(target, lambda sample, wrong=wrong: codec.roundtrip(
            HiddenStates(states[sample.id].taps, wrong(sample.id)), sample.loss_mask), codec)
