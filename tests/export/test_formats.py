"""Exported folders: every key and tensor that a server reads, written explicitly, and read back strictly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import dflash, random_samples, states_of, uneven

from trainer.architectures.dflash import DFlash
from trainer.cpu_build import CpuServer
from trainer.errors import UserError
from trainer.export.base import CPU_VLLM, FUSED_VLLM
from trainer.export.card import Card
from trainer.export.formats import FORMATS, FormatName, Serving
from trainer.target import Target
from trainer.target_head import load_target_head

SERVING = Serving("org/target", ["LlamaForCausalLM"], 3)
TAPS, ROWS, HIDDEN, BLOCK = [1, 3], 280, 64, 5
THREE = {"num_speculative_tokens": 3}
LAYER_TENSORS = {  # of the tiny target's sizes: 4 heads and 2 key/value heads of 16, inner size 128
    "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
    "self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,), "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64), "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64), "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64), "mlp.down_proj.weight": (64, 128)}


def make(target: Target, **settings: Any) -> DFlash:
    return uneven(dflash(target, **{"tap_layers": TAPS, "draft_vocab_size": ROWS, **settings})).eval()


def write(drafter: DFlash, form: str, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    FORMATS[form].write(folder, drafter.export(), SERVING, dtype)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    return json.loads((folder / "config.json").read_text())


def geometry(target: Target) -> dict[str, Any]:
    """What a draft's decoder must share with its target, every key written."""
    return {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "hidden_act": "silu",
            "rms_norm_eps": target.config["rms_norm_eps"], "attention_bias": False, "attention_dropout": 0.0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "max_position_embeddings": 2048,
            "vocab_size": 320, "layer_types": ["full_attention"] * 2, "sliding_window": None,
            "use_sliding_window": False, "tie_word_embeddings": False, "initializer_range": 0.02}


def test_a_speculators_config_names_every_key(tiny_target: Target, tmp_path: Path) -> None:
    assert write(make(tiny_target), "speculators", tmp_path) == {
        "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": BLOCK,
        "aux_hidden_state_layer_ids": TAPS, "mask_token_id": tiny_target.mask_token_id,
        "draft_vocab_size": ROWS,
        "sample_from_anchor": False, "sliding_window_non_causal": True, "target_hidden_size": HIDDEN,
        "tie_word_embeddings": False, "transformer_layer_config": geometry(tiny_target),
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}}}


def test_a_native_config_counts_layers_from_their_outputs(tiny_target: Target, tmp_path: Path) -> None:
    """`target_layer_ids` i is the output of layer i, which is the stream after i + 1 layers."""
    assert write(make(tiny_target), "native", tmp_path) == {
        **geometry(tiny_target), "architectures": ["DFlashDraftModel"], "block_size": BLOCK,
        "draft_vocab_size": ROWS,
        "eagle_aux_hidden_state_layer_ids": TAPS, "target_hidden_size": HIDDEN,
        "dflash_config": {"mask_token_id": tiny_target.mask_token_id, "target_layer_ids": [0, 2],
                          "causal": False,
                          "sample_from_anchor": False}}


def test_a_speculators_config_has_no_model_type_at_the_top(tiny_target: Target, tmp_path: Path) -> None:
    """With one, a server would read the whole file as that model's config."""
    assert "model_type" not in write(make(tiny_target), "speculators", tmp_path)


@pytest.mark.parametrize("form", sorted(DFlash.formats))
@pytest.mark.parametrize("rows", [ROWS, None])
def test_tensors_are_those_of_the_method(tiny_target: Target, tmp_path: Path, form: str,
                                         rows: int | None) -> None:
    drafter = make(tiny_target, draft_vocab_size=rows)
    config = write(drafter, form, tmp_path, torch.bfloat16)
    expected = {f"layers.{layer}.{name}": shape for layer in range(2)
                for name, shape in LAYER_TENSORS.items()}
    expected |= {"fc.weight": (64, 2 * 64), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    if rows is not None:
        expected |= {"lm_head.weight": (rows, 64), "d2t": (rows,)}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    assert config["draft_vocab_size"] == (rows or 320)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    if rows is not None:
        ids = torch.arange(rows) + tensors["d2t"]
        assert tensors["d2t"].dtype == torch.int64 and torch.equal(ids, drafter.vocabulary.ids)
        head = load_target_head(tiny_target.folder, tiny_target.config).head
        assert torch.equal(tensors["lm_head.weight"], head[ids].bfloat16())


@pytest.mark.parametrize("form", sorted(DFlash.formats))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_folder_alone_describes_the_drafter(tiny_target: Target, tmp_path: Path, form: str,
                                              dtype: torch.dtype,
                                              rows: int | None) -> None:
    drafter = make(tiny_target, draft_vocab_size=rows)
    write(drafter, form, tmp_path, dtype)
    head = load_target_head(tiny_target.folder, tiny_target.config)
    again = DFlash.restore(FORMATS[form].read(tmp_path), form, head)
    rounded = drafter.rounded(dtype)
    assert again.tap_layers == drafter.tap_layers == (1, 3) and again.max_k == drafter.max_k == 4
    assert again.mask_token_id == tiny_target.mask_token_id
    assert not any(parameter.requires_grad for parameter in again.parameters())
    samples = random_samples((20,))
    [state], tokens = states_of(tiny_target, samples, TAPS), samples[0].tokens
    found = [each.draft_logits(each.extend(each.new_context(), tokens, state.taps), 70, 4)
             for each in (rounded, again)]
    assert torch.equal(*found)
    context = drafter.extend(drafter.new_context(), tokens, state.taps)
    assert torch.equal(drafter.draft_logits(context, 70, 4), found[0]) == (dtype == torch.float32)


def drop(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")
    return change


def add(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"verifier_norm.weight": torch.ones(64)}, folder / "model.safetensors")


@pytest.mark.parametrize("form", sorted(DFlash.formats))
@pytest.mark.parametrize("change", [drop("layers.1.self_attn.q_proj.weight"), drop("fc.weight"), add])
def test_tensors_that_are_missing_or_too_many_are_no_drafter(tiny_target: Target, tmp_path: Path, form: str,
                                                            change: Callable[[Path], None]) -> None:
    write(make(tiny_target), form, tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=f"is not a readable {form} speculator .*1 tensors are not those of "
                                        "its config.json"):
        FORMATS[form].read(tmp_path)


@pytest.mark.parametrize("form", sorted(DFlash.formats))
@pytest.mark.parametrize("damage", ["no config", "bad config", "no tensors", "torn tensors", "no folder"])
def test_a_folder_that_cannot_be_read_is_named(tiny_target: Target, tmp_path: Path, form: str,
                                               damage: str) -> None:
    folder = tmp_path / "speculator"
    write(make(tiny_target), form, folder)
    config, tensors = folder / "config.json", folder / "model.safetensors"
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage.startswith("no "):
        (config if damage == "no config" else tensors).unlink()
    elif damage == "bad config":
        config.write_text("{")
    else:
        tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{folder} is not a readable {form} speculator .*; remove {tmp_path} "
                                        "and run the same command again"):
        FORMATS[form].read(folder)


def test_the_names_are_those_of_the_settings() -> None:
    assert set(get_args(FormatName)) == set(FORMATS)


def test_commands_and_card_say_how_to_serve() -> None:
    commands = FORMATS["speculators"].commands("dflash", Path("/a b/spec"), "org/target", THREE)
    assert commands["vllm (short)"] == "vllm serve '/a b/spec'"
    speculation = {"method": "dflash", "model": "/a b/spec", "num_speculative_tokens": 3}
    assert commands["vllm"] == f"vllm serve org/target --speculative-config '{json.dumps(speculation)}'"
    native = FORMATS["native"].commands("dflash", Path("/s"), "t", THREE)
    assert native == {"vllm": native["vllm"], FUSED_VLLM: f"TRAINER_FUSED_VERIFY=1 {native['vllm']}"}
    tuned = {**THREE, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 16, 0]]}
    on_cpu = FORMATS["native"].commands("dflash", Path("/s"), "t", THREE, CpuServer("bfloat16", 99, 3))
    assert on_cpu == native | {CPU_VLLM: native["vllm"].replace("vllm serve t", (
        "VLLM_CPU_KVCACHE_SPACE=3 vllm serve t --dtype bfloat16 --max-model-len 99 "
        "--no-enable-chunked-prefill"))}
    assert json.dumps(tuned)[1:-1] in FORMATS["native"].commands("dflash", Path("/s"), "t", tuned)["vllm"]
    facts = {"method": "dflash", "needs_v2": False, "target": "org/target", "target_identity": "0123",
             "template_hash": "4567", "max_k": 7, "default_k": 3, "trained_modes": ["chat", "thinking"]}
    card = Card("speculators", facts, "Target").text()
    assert card.startswith("---\nbase_model: org/target\nlibrary_name: vllm\nlicense: unknown\n")
    here = FORMATS["speculators"].commands("dflash", ".", "org/target", THREE)
    assert card.count("TRAINER_FUSED_VERIFY") == 1 and here[FUSED_VLLM] in card
    for part in ("| longest draft (max K) | 7 |", "| default draft (K) | 3 |", "`0123`", "`4567`",
                 "chat, thinking",
                 f"```bash\n{here['vllm']}\n```", "\n# Speculator for Target (dflash)\n"):
        assert part in card
    assert "Model Runner V2" not in card
    assert "Model Runner V2 alone" in Card("speculators", facts | {"needs_v2": True}, "Target").text()
