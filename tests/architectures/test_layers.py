"""Shared parts of drafters: norm, rotary positions of every kind, and the draft vocabulary."""

from __future__ import annotations

import json
from math import ceil, cos, floor, log, pi, sin
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import copied, dflash

from trainer.architectures import vocabulary
from trainer.architectures.layers import GatedMLP, RMSNorm, Rotary, rotate
from trainer.errors import UserError
from trainer.target import Target

SIZE, LIMIT, THETA = 16, 4096, 5000.0
LLAMA3 = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 1024,
        "beta_fast": 32.0, "beta_slow": 1.0}


def plain(index: int) -> float:
    return THETA ** (-2 * index / SIZE)


def llama3(index: int) -> float:
    """Long waves are stretched by the factor, short ones stay, and what lies between is mixed."""
    frequency, original = plain(index), LLAMA3["original_max_position_embeddings"]
    turns = original * frequency / (2 * pi)
    if turns < LLAMA3["low_freq_factor"]:
        return frequency / LLAMA3["factor"]
    if turns > LLAMA3["high_freq_factor"]:
        return frequency
    smooth = (turns - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
    return (1 - smooth) * frequency / LLAMA3["factor"] + smooth * frequency


def yarn(index: int) -> float:
    """A ramp over the dimensions from where a wave turns `beta_fast` times to where it turns `beta_slow`
    times."""
    def dimension(turns: float) -> float:
        return SIZE * log(YARN["original_max_position_embeddings"] / (turns * 2 * pi)) / (2 * log(THETA))

    low, high = max(floor(dimension(YARN["beta_fast"])), 0), min(ceil(dimension(YARN["beta_slow"])), SIZE - 1)
    ramp = min(1.0, max(0.0, (index - low) / (high - low)))
    return plain(index) * (1 - ramp) + plain(index) / YARN["factor"] * ramp


@pytest.mark.parametrize(("parameters", "frequency", "scale"), [
    ({"rope_theta": THETA}, plain, 1.0), ({"rope_type": "default", "rope_theta": THETA}, plain, 1.0),
    (LLAMA3, llama3, 1.0), (YARN, yarn, 0.1 * log(4.0) + 1)])
def test_rotary_positions_of_every_kind(parameters: dict[str, Any], frequency: Any, scale: float) -> None:
    positions = torch.tensor([[0, 1, 7], [100, 1000, 4000]])
    found = torch.stack(Rotary(SIZE, parameters, LIMIT)(positions))
    assert found.shape == (2, 2, 3, SIZE)
    expected = torch.tensor([[[[scale * turn(position * frequency(index % (SIZE // 2)))
                                for index in range(SIZE)]
                               for position in row] for row in positions.tolist()] for turn in (cos, sin)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_an_unknown_rope_type_is_named() -> None:
    with pytest.raises(ValueError, match="rope_type 'spiral' of the target is not known; known are .*'yarn'"):
        Rotary(SIZE, {"rope_type": "spiral", "rope_theta": THETA}, LIMIT)


@pytest.mark.parametrize("parameters", [LLAMA3, YARN])
def test_the_target_s_rope_reaches_the_exported_config(tiny_target: Target, tmp_path: Path,
                                                       parameters: dict[str, Any]) -> None:
    target = copied(tiny_target, tmp_path / "target", config={"rope_parameters": parameters})
    assert dflash(target).export().geometry["rope_parameters"] == parameters


@pytest.mark.parametrize(("config", "expected"), [
    ({"rope_parameters": None, "rope_theta": 77.0}, {"rope_type": "default", "rope_theta": 77.0}),
    ({"rope_parameters": None, "rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0})])
def test_older_configs_say_it_at_the_top(tiny_target: Target, tmp_path: Path, config: dict[str, Any],
                                         expected: dict[str, Any]) -> None:
    target = copied(tiny_target, tmp_path / "target", config=config)
    assert dflash(target).export().geometry["rope_parameters"] == expected


def test_a_theta_is_never_guessed(tiny_target: Target, tmp_path: Path) -> None:
    target = copied(tiny_target, tmp_path / "target")
    config = json.loads((target.folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default"}
    (target.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no rope_theta"):
        dflash(target)


def test_turning_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = Rotary(SIZE, {"rope_theta": THETA}, LIMIT)
    one, two = torch.randn(2, 3, SIZE, generator=torch.Generator().manual_seed(0))

    def product(first: int, second: int) -> torch.Tensor:
        turned = [rotate(vector[None], *rotary(torch.tensor([place])))
                  for vector, place in ((one, first), (two, second))]
        torch.testing.assert_close(turned[0].norm(dim=-1)[0], one.norm(dim=-1))
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(product(3, 10), product(203, 210), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(product(3, 10), product(3, 11), atol=1e-2)


def test_norm_and_mlp_in_float64() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 3
    norm, mlp = RMSNorm(8, 1e-3), GatedMLP(8, 12)
    norm.weight.data.uniform_(0.2, 2)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), expected.float())
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    gate, up, down = (each.weight.double() for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    inner = wide @ gate.T
    torch.testing.assert_close(mlp(x), ((inner / (1 + (-inner).exp()) * (wide @ up.T)) @ down.T).float(),
                               atol=1e-5, rtol=1e-5)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_draft_vocabulary_has_the_most_frequent_tokens_and_the_forced_ones(counts: list[int],
                                                                               data: Any) -> None:
    forced = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=min(4, len(counts) - 1)))
    size = data.draw(st.integers(len(forced) + 1, len(counts)))
    ids = vocabulary.choose(torch.tensor(counts), size, tuple(forced)).tolist()
    assert len(ids) == size and ids == sorted(set(ids)) and forced <= set(ids)
    left_out = set(range(len(counts))) - set(ids)
    for inside in set(ids) - forced:
        assert all((counts[inside], -inside) > (counts[outside], -outside) for outside in left_out)
    offsets = vocabulary.offsets(torch.tensor(ids))
    assert (torch.arange(size) + offsets).tolist() == ids and offsets.dtype == torch.int64
    share = vocabulary.coverage(torch.tensor(counts), torch.tensor(ids))
    assert share == pytest.approx(sum(counts[each] for each in ids) / max(1, sum(counts)))


@pytest.mark.parametrize(("size", "forced"), [(2, (1, 3, 4)), (3, (1, 3, 4)), (11, ()), (0, (1,))])
def test_a_draft_vocabulary_that_cannot_be_is_refused(size: int, forced: tuple[int, ...]) -> None:
    with pytest.raises(ValueError,
                       match=f"draft_vocab_size={size} must lie between {len(forced) + 1}, as .* 10 rows"):
        vocabulary.choose(torch.ones(10, dtype=torch.int64), size, forced)
