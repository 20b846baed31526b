"""A draft's decoder takes the target's sizes, and of its positions what a draft has, too."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.architectures.geometry import geometry, lengthened
from trainer.architectures.layers import Rotary

CONFIG: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
                          "head_dim": 32, "intermediate_size": 96, "rms_norm_eps": 1e-6,
                          "max_position_embeddings": 512, "vocab_size": 320}


@pytest.mark.parametrize("rope", [
    {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
    {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
])
def test_a_draft_turns_whole_heads_whatever_its_target_does(rope: dict[str, Any]) -> None:
    """A server reads a partial_rotary_factor, and would turn a part of what was trained as a whole."""
    found = geometry({**CONFIG, "rope_parameters": rope}, 1, None)["rope_parameters"]
    assert found == {"rope_theta": 1e7, "rope_type": "default"}


def test_the_scaling_of_positions_is_the_target_s() -> None:
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert geometry({**CONFIG, "rope_parameters": rope}, 1, None)["rope_parameters"] == rope


LONG = {"factor": 4.0, "short_factor": [1.5] * 16, "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("rope", "kind"), [
    ({"type": "linear", "factor": 2.0}, "linear"), ({"type": "su", **LONG}, "longrope"),
    ({"type": "mrope", "mrope_section": [2, 1, 1]}, "default"), ({"type": None}, "default"),
    ({"type": "yarn", "rope_type": "yarn", "factor": 2.0}, "yarn")])
def test_an_older_name_of_the_rope_type_is_read_as_servers_do(rope: dict[str, Any], kind: str) -> None:
    """Beside a rope_type a server refuses it; not read, a scaled target would have an unscaled draft."""
    found = geometry({**CONFIG, "rope_theta": 1e4, "rope_scaling": rope}, 1, None)["rope_parameters"]
    kept = {key: value for key, value in rope.items() if key not in ("type", "mrope_section")}
    assert found == {**kept, "rope_type": kind, "rope_theta": 1e4}
    plain = Rotary(32, {"rope_theta": 1e4}, 512).inverse
    assert bool((Rotary(32, found, 512).inverse == plain).all()) == (kind == "default")


@pytest.mark.parametrize(("changes", "said"), [
    ({"rope_parameters": {"type": "linear", "rope_type": "default", "rope_theta": 1e4}}, "type linear and"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 and num_key_value_heads 3"),
    ({"head_dim": 33}, r"16.5 finite frequencies for heads of 33 \(head_dim\)"),
    ({"rope_parameters": {"rope_theta": 0.0}}, "finite frequencies"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "finite frequencies"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 0.0}}, "rope_parameters"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", **LONG, "short_factor": [1.0] * 3}},
     "rope_parameters .* cannot be used for rope_type longrope"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", **LONG, "short_factor": [0.0] * 16}},
     "finite frequencies")])
def test_positions_that_cannot_be_are_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shape = geometry({**CONFIG, "rope_theta": 1e4, **changes}, 1, None)
        Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])


def test_a_longer_context_scales_from_the_length_there_is() -> None:
    plain = geometry({**CONFIG, "rope_theta": 1e4}, 1, None)
    found = lengthened(plain, 2048)
    assert found["max_position_embeddings"] == 2048 and plain["max_position_embeddings"] == 512
    assert found["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                        "original_max_position_embeddings": 512}
    assert {key: value for key, value in found.items() if plain[key] != value}.keys() == {
        "max_position_embeddings", "rope_parameters"}
    before, after = (Rotary(32, shape["rope_parameters"], shape["max_position_embeddings"]).inverse
                     for shape in (plain, found))
    assert before[0] == after[0] and float(before[-1] / after[-1]) == pytest.approx(4.0), \
        "fast turns are kept, slow ones are stretched"


def test_a_scaled_draft_is_scaled_further_from_where_it_began() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    found = lengthened(geometry({**CONFIG, "rope_parameters": rope}, 1, None), 1024)
    assert found["rope_parameters"] == {**rope, "factor": 8.0}
    del rope["original_max_position_embeddings"]
    found = lengthened(geometry({**CONFIG, "rope_parameters": rope}, 1, None), 1024)
    assert found["rope_parameters"] == {**rope, "factor": 8.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("rope", "context", "said"), [
    ({}, 512, "export.max_context=512 must be more than the 512 positions"),
    ({"rope_type": "linear", "factor": 2.0}, 1024, "positions of the kind linear, which are scaled already")])
def test_what_cannot_be_scaled_is_said(rope: dict[str, Any], context: int, said: str) -> None:
    shape = geometry({**CONFIG, "rope_parameters": {"rope_theta": 1e4, **rope}}, 1, None)
    with pytest.raises(ValueError, match=said):
        lengthened(shape, context)
