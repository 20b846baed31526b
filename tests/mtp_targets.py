"""Tiny random targets of every family that brings an MTP module, as their checkpoints are laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers import DeepseekV3Config as DeepseekV3
from transformers import Glm4MoeConfig as Glm4Moe
from transformers import Glm4MoeLiteConfig as Glm4MoeLite
from transformers import Qwen3_5MoeTextConfig as Qwen3_5Moe
from transformers import Qwen3_5TextConfig as Qwen3_5
from transformers import Qwen3NextConfig as Qwen3Next

from trainer.architectures.mtp_layouts import LAYOUTS, layout_of, split
from trainer.architectures.mtp_module import Module
from trainer.target import Folder, Target
from trainer.target_made import byte_tokenizer

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "max_position_embeddings": 512, "tie_word_embeddings": False}
PLAIN = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {**SIZES, **EXPERTS, "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 512,
          "q_lora_rank": 48, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GATED = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 48}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
DEEPSEEK = {**LATENT, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], bool]] = {  # whether experts lie apart
    "glm4_moe": (Glm4Moe, {**PLAIN, **EXPERTS, "use_qk_norm": True, "attention_bias": True}, True),
    "glm4_moe_lite": (Glm4MoeLite, LATENT, True),
    "deepseek_v3": (DeepseekV3, {**DEEPSEEK, "rope_parameters": YARN}, True),
    "two_modules": (DeepseekV3, DEEPSEEK, True),  # with unscaled positions
    "qwen3_5": (Qwen3_5, GATED, True),
    "qwen3_5_moe": (Qwen3_5Moe, {**GATED, **SPARSE}, False),
    "qwen3_next": (Qwen3Next, {**GATED, **SPARSE}, True)}
KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # of DeepSeek's files


def random_target(family: str, folder: Path) -> Target:
    """The target with its modules, whose tensors are in a file of their own, in an index."""
    kind, sizes, apart = FAMILIES[family]
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(kind(**sizes), dtype=torch.float32)
    for parameter in model.parameters():
        spread(parameter)
    model.lm_head.weight.data *= 4  # for logits of a usual scale
    model.save_pretrained(folder)
    byte_tokenizer(320).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | (KEYS if kind is DeepseekV3 else {})
    layout = LAYOUTS[config["model_type"]]
    config[layout.count] = 2 if family == "two_modules" else 1
    path.write_text(json.dumps(config))
    modules = nn.ModuleList(Module(layout, config) for _ in range(config[layout.count]))
    for tensor in modules.state_dict().values():
        spread(tensor)
    own = modules.state_dict()
    save_file({layout.target_name(name, config): tensor.contiguous()
               for name, tensor in (split(own) if apart else own).items()} | shared(config, model),
              folder / "mtp.safetensors", metadata={"format": "pt"})
    places = {}
    for file in ("model.safetensors", "mtp.safetensors"):
        with safe_open(folder / file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return Target(family, Folder(str(folder)), "<|mask|>", [config["num_hidden_layers"]], {}, 256, False)


def shared(config: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """The copies of embedding and head that DeepSeek's and GLM's files have in each module."""
    prefixes = [prefix for prefix in layout_of(config).prefixes(config) if prefix.startswith("model.layers")]
    copies = {"embed_tokens.weight": model.get_input_embeddings(), "shared_head.head.weight": model.lm_head}
    return {prefix + name: part.weight.detach().clone()
            for prefix in prefixes for name, part in copies.items()}


@torch.no_grad()
def spread(tensor: Tensor) -> None:
    """Random values, wide enough that no part can be left out without a trace."""
    noise = torch.randn(tensor.shape)
    if tensor.ndim == 1:  # norms, biases, scores of experts
        tensor.copy_(0.5 + 0.3 * noise)
    else:
        tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.shape[-1] > 1 else 0.1 * noise)
