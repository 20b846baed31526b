"""Embedding, norm and head read from checkpoints of several layouts give the target's own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaConfig, Qwen3Config

from trainer.errors import UserError
from trainer.target_head import load_target_head, read_tensors, tensor_names

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 48, "vocab_size": 96, "head_dim": 16, "max_position_embeddings": 64}
TOKENS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(0))


def save(folder: Path, config: Any, max_shard_size: str = "1GB") -> nn.Module:
    """A model of random weights, norms included, saved as a checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def compare(folder: Path, model: nn.Module) -> None:
    """The stream before the final norm, through our head, against the model's logits."""
    config = json.loads((folder / "config.json").read_text())
    head = load_target_head(folder, config.get("text_config", config))
    taken: list[torch.Tensor] = []
    model.get_decoder().norm.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
    expected = model(TOKENS).logits[0]
    found = head.logits(taken[0][0])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert found.dtype == torch.float32 and (head.hidden_size, head.vocab_size) == (32, 96)
    rows = torch.tensor([90, 3, 17])
    torch.testing.assert_close(head.logits(taken[0][0], rows), expected[:, rows], atol=2e-5, rtol=1e-5)
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)


FAMILIES = {
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rms_norm_eps=1e-3),
    "scaled logits": GraniteConfig(**SIZES, logits_scaling=7.0, embedding_multiplier=3.0),
    "norm of one plus weight, soft cap": Gemma2Config(**SIZES, final_logit_softcapping=4.0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_gives_the_logits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    compare(tmp_path, save(tmp_path, FAMILIES[name]))


def test_only_the_shards_that_hold_the_three_matrices_are_read(tmp_path: Path) -> None:
    model = save(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=False), max_shard_size="10KB")
    names = tensor_names(tmp_path)
    wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    needed = {names[name] for name in wanted}
    assert len(set(names.values())) > len(needed) == 3
    for path in set(names.values()) - needed:
        path.unlink()
    compare(tmp_path, model)
    with pytest.raises(UserError, match="cannot be read"):
        read_tensors(tmp_path, ["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_prefixes_of_multimodal_targets_need_no_table(tmp_path: Path, prefix: str) -> None:
    model = save(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=False))
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in
               load_file(tmp_path / "model.safetensors").items()}
    decoys = {"model.visual.vision_model.norm.weight": torch.ones(32), "mtp.norm.weight": torch.ones(32),
              "model.vision_tower.embed_tokens.weight": torch.ones(96, 32),
              "mtp.lm_head.weight": torch.ones(96, 32),
              "mtp.embed_tokens.weight": torch.ones(96, 32)}
    save_file(decoys | tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": config}))
    compare(tmp_path, model)


def test_the_norm_keeps_the_dtype_of_what_it_reads(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    head = load_target_head(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    last = torch.randn(5, 32).bfloat16()
    assert head.normed(last).dtype == torch.bfloat16 and head.logits(last).dtype == torch.float32


@pytest.mark.parametrize(("kind", "offset"), [("llama", 0.0), ("gemma3_text", 1.0), ("gemma3n_text", 0.0),
                                              ("gemma4_text", 0.0), ("qwen3", 0.0), ("qwen3_next", 1.0),
                                              ("qwen3_5_text", 1.0)])
def test_families_differ_in_how_the_norm_multiplies(tmp_path: Path, kind: str, offset: float) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    config = json.loads((tmp_path / "config.json").read_text())
    assert load_target_head(tmp_path, {**config, "model_type": kind}).norm_offset == offset


def test_a_head_that_the_config_denies_is_told(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=False))
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UserError, match="an lm_head.weight other than its embedding, and its config.json "
                                        "says tie_word_embeddings=true"):
        load_target_head(tmp_path, {**config, "tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
              tmp_path / "model.safetensors")
    load_target_head(tmp_path, {**config, "tie_word_embeddings": True})
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has no lm_head.weight, .* so its head is missing"):
        load_target_head(tmp_path, config)


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_checkpoint_of_another_layout_is_named(tmp_path: Path, lost: str) -> None:
    save(tmp_path, LlamaConfig(**SIZES))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{tmp_path} has no tensor ending in .*{lost.split('.')[-2]}.weight"):
        load_target_head(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UserError, match=f"has no tensor {lost}"):
        read_tensors(tmp_path, [lost])


def test_a_norm_without_its_constant_is_told(tmp_path: Path) -> None:
    save(tmp_path, FAMILIES["tied"])
    with pytest.raises(UserError, match="config.json has no rms_norm_eps, so the target's final norm would"):
        load_target_head(tmp_path, {"tie_word_embeddings": True}, values=False)
