"""A config.json that cannot be read, or is not that of the weights beside it, is told before any run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import copied
from torch import Tensor

from trainer.errors import UserError
from trainer.target import Target
from trainer.target_fit import load_model


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **values}}


@pytest.mark.parametrize(("config", "said"), [
    # values of the wrong kind
    ({"head_dim": "16"}, "head_dim must be int of at least 1 or null, but is '16'"),
    ({"head_dim": 0}, "head_dim must be int of at least 1 or null, but is 0"),
    ({"intermediate_size": "128"}, "intermediate_size must be int"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings must be int"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps must be float above 0"),
    ({"logits_scaling": 0}, "logits_scaling must be float above 0"),
    ({"quantization_config": "fp8"}, "quantization_config must be dict"),
    ({"rope_parameters": "x"}, "rope_parameters must be dict"),
    (rope(rope_theta="abc"), "rope_parameters.rope_theta must be float above 0 or null, but is 'abc'"),
    (rope(rope_theta=10**400), "rope_parameters.rope_theta must be float above 0"),
    ({"model_type": [1]}, "model_type must be str"),
    (rope(rope_theta=-1), "rope_parameters.rope_theta must be float above 0"),
    ({"rope_parameters": {"full": {"rope_theta": 0}}}, "rope_parameters.full.rope_theta must be"),
    (rope(rope_type="yarn", factor=0), "rope_parameters.factor must be float above 0"),
    ({"text_config": None}, "says vocab_size None"),
    # what transformers refuses
    ({"num_attention_heads": 3}, "is not the config of a llama that transformers takes"),
    ({"hidden_act": 5}, "is not the config of a llama .*hidden_act"),
    (rope(rope_type="yarn"), "is not the config of a llama .*factor"),
    # sizes of others
    ({"vocab_size": 400}, r"vocab_size 400, but model.embed_tokens.weight in .* has the size \[320, 64\]"),
    ({"hidden_size": 32}, r"hidden_size 32, but model.embed_tokens.weight in .* has the size \[320, 64\]"),
    ({"num_hidden_layers": 5}, "num_hidden_layers 5, but .* of the layers 0 to 2, none of layer 3"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2, but .* of the layers 0 to 2, an ordinary layer 2 too"),
    ({"num_key_value_heads": None}, "num_key_value_heads None and head_dim 16, .* 32 rows, expected 64"),
    ({"head_dim": 8}, "num_key_value_heads 2 and head_dim 8, .* has 32 rows, expected 16"),
], ids=str)
def test_a_config_that_does_not_fit_is_said(tiny_target: Target, tmp_path: Path, config: dict[str, Any],
                                            said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        _ = copied(tiny_target, tmp_path / "target", config=config).config
    assert f"{tmp_path / 'target' / 'config.json'}" in str(caught.value) and "\n" not in str(caught.value)
    assert "fetch" in str(caught.value)


def test_what_is_packed_or_of_another_make_has_sizes_of_its_own(tiny_target: Target, tmp_path: Path) -> None:
    """Quantised tensors, and a layer beyond the decoder's, such as an MTP module."""
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "k_proj" in name]:
            tensors[name] = torch.zeros(5, 7, dtype=torch.int32)
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)

    _ = copied(tiny_target, tmp_path / "target", change).config


def without_a_projection(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(("change", "config", "said"), [
    (None, {"intermediate_size": 96}, r"mlp.down_proj.weight has the size \[64, 128\] there and \[64, 96\]"),
    (without_a_projection, {}, r"lacks 1 of the tensors .*\(model.layers.1.mlp.up_proj.weight\), which would "
                               "be random"),
    (None, {"hidden_act": "none_such"}, "cannot be loaded by transformers"),
    (None, {"model_type": "none_such"}, "cannot be loaded by transformers")])
def test_no_weight_of_a_target_is_random(tiny_target: Target, tmp_path: Path,
                                         change: Callable[[dict[str, Tensor]], Any] | None,
                                         config: dict[str, Any], said: str) -> None:
    other = copied(tiny_target, tmp_path / "target", change, config=config)
    with pytest.raises(UserError, match=said):
        load_model(other.folder, torch.float32, False)
