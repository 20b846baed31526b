"""A draft's decoder takes the target's sizes, and of its positions what a draft has, too."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.architectures.geometry import geometry

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
