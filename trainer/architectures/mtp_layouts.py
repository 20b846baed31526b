"""Where each family of targets keeps its multi-token prediction (MTP) module, and how that is put together.

All that differs between families is data here: names, the order of the two halves that the module reads,
which state of the target the server hands over, and the decoder layer, norm and rotary positions, which are
those of transformers. As read in vLLM 0.32, `model_executor/models/{mimo,qwen3_next,qwen3_5,deepseek,
glm4_moe,glm4_moe_lite}_mtp.py`; all families but the GLM ones are fed their own normed output. """

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EXPERT = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"],
             "first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1,
             "use_sliding_window": False, "sliding_window": None}
PARTS = ("token_norm", "state_norm", "input_proj", "norm")
SHARED = ("embed_tokens.weight", "head.weight")
NEW = ("llama", "qwen2")  # what is served as a MiMo with a module, by a config.json that says so


@dataclass(frozen=True)
class Layout:
    """`library` and `classes` name the parts in transformers. `prefix` begins the names of a module's
    tensors, {layer} being its number and {behind} that among the target's layers; `names` are those of PARTS
    behind it, `block` begins those of the decoder layer. `count` is the key of config.json with the number of
    modules."""

    library: str
    classes: str
    rotary: str
    prefix: str
    names: tuple[str, str, str, str]
    block: str
    count: str
    state_first: bool   # the state before the token in what input_proj reads
    normed_state: bool  # the server hands over the target's state behind its final norm
    feeds_normed: bool  # what a step hands to the next one is behind the module's norm
    blank_start: bool   # the token of position 0 counts as a zero embedding
    several: bool       # the server runs one module a step where there are several, else the first alone

    def part(self, name: str) -> Any:
        library = f"transformers.models.{self.library}.modeling_{self.library}"
        return getattr(importlib.import_module(library), name)

    def modules(self, config: Mapping[str, Any]) -> int:
        """How many a server runs."""
        return max(1, config.get(self.count) or 0) if self.several else 1

    def prefixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """How the names of each module's tensors begin."""
        return tuple(self.prefix.format(layer=layer, behind=config["num_hidden_layers"] + layer)
                     for layer in range(self.modules(config)))

    def target_name(self, own: str, config: Mapping[str, Any]) -> str:
        """The name in the target's files of our `own` tensor, such as `0.norm.weight` or `0.block.mlp...`."""
        layer, part, rest = own.split(".", 2)
        place = self.block + rest if part == "block" else f"{self.names[PARTS.index(part)]}.{rest}"
        return self.prefixes(config)[int(layer)] + place

    def own_names(self, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
        """Those of the target's tensors that are the modules', each with our name; copies of the target's
        embedding and head, which some files have among them, and modules that no server runs are left out."""
        found = {}
        for layer, prefix in enumerate(self.prefixes(config)):
            for name in names:
                rest = name.removeprefix(prefix)
                part, _, leaf = rest.rpartition(".")
                if rest == name or rest.endswith(SHARED):
                    continue
                if part in self.names:
                    found[name] = f"{layer}.{PARTS[self.names.index(part)]}.{leaf}"
                elif rest.startswith(self.block):
                    found[name] = f"{layer}.block.{rest.removeprefix(self.block)}"
        return found


MIMO = Layout("qwen2", "Qwen2", "Qwen2RotaryEmbedding", "model.mtp_layers.{layer}.",
              ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "",
              "num_nextn_predict_layers", state_first=True, normed_state=False, feeds_normed=True,
              blank_start=True, several=False)


def _qwen(library: str, classes: str, rotary: str, count: str) -> Layout:
    return Layout(library, classes, rotary, "mtp.",
                  ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.", count,
                  state_first=False, normed_state=True, feeds_normed=True, blank_start=False,
                  several=False)


def _behind(library: str, classes: str, feeds_normed: bool) -> Layout:
    return Layout(library, classes, f"{classes}RotaryEmbedding", "model.layers.{behind}.",
                  ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "", "num_nextn_predict_layers",
                  state_first=False, normed_state=True, feeds_normed=feeds_normed, blank_start=True,
                  several=True)


QWEN3_5 = _qwen("qwen3_5", "Qwen3_5", "Qwen3_5TextRotaryEmbedding", "mtp_num_hidden_layers")
QWEN3_5_MOE = _qwen("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextRotaryEmbedding", "mtp_num_hidden_layers")
LAYOUTS = {  # by the target's model_type
    "mimo": MIMO, "llama": MIMO, "qwen2": MIMO, "qwen3_5": QWEN3_5, "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE, "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": _qwen("qwen3_next", "Qwen3Next", "Qwen3NextRotaryEmbedding", "num_nextn_predict_layers"),
    "deepseek_v3": _behind("deepseek_v3", "DeepseekV3", feeds_normed=True),
    "glm4_moe": _behind("glm4_moe", "Glm4Moe", feeds_normed=False),
    "glm4_moe_lite": _behind("glm4_moe_lite", "Glm4MoeLite", feeds_normed=False)}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout of a target with this (text) config; ValueError where none is known, or no server would find
    a module."""
    kind = config.get("model_type")
    if kind not in LAYOUTS:
        raise ValueError(f"a target of model_type {kind} has no MTP module that is known here (known: "
                         f"{', '.join(sorted(LAYOUTS))}); set drafter=eagle3 or drafter=dflash")
    if found := config.get("quantization_config"):
        method = found.get("quant_method", "some method") if isinstance(found, dict) else found
        raise ValueError(f"the target's weights are quantised (quantization_config in its config.json: "
                         f"{method}), so a trained MTP module cannot be put back among them; take the "
                         "checkpoint that is not quantised")
    layout = LAYOUTS[kind]
    counted = layout.several or layout is MIMO  # servers of the others take one where nothing is said
    count = config.get(layout.count, None if counted else 1)
    if kind not in NEW and (type(count) is not int or count < 1):
        raise ValueError(f"the target's config.json says {layout.count} {count!r}, by which a server finds "
                         "no MTP module; write the number of those in its files there, where it has any, or "
                         "set drafter=eagle3 or drafter=dflash")
    return layout


def layer_config(layout: Layout, config: Mapping[str, Any]) -> Any:
    """The config of transformers for a single decoder layer of the module."""
    from transformers import CONFIG_MAPPING

    kind = "qwen2" if layout is MIMO else config["model_type"]
    kind = f"{kind}_text" if kind in ("qwen3_5", "qwen3_5_moe") else kind
    kept = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    found = CONFIG_MAPPING[kind](**{**kept, **ONE_LAYER})
    found._attn_implementation, found._experts_implementation = "sdpa", "eager"
    return found


def served_as(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What config.json of a target without a module must say for a server to find a new one, and the tensors
    that the target needs for it. A Llama is a MiMo whose biases of queries, keys and values are zero."""
    if config["model_type"] not in NEW:
        return {}, {}
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1,
               "attention_bias": True, "use_sliding_window": False}
    if config["model_type"] == "qwen2":
        return changes, {}
    heads, size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    rows = {"q": heads * size, "k": config.get("num_key_value_heads", heads) * size}
    rows["v"] = rows["k"]
    return changes, {f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.zeros(count)
                     for layer in range(config["num_hidden_layers"]) for part, count in rows.items()}


def unlike_mimo(config: Mapping[str, Any]) -> str | None:
    """The setting of its config.json for which a Llama or Qwen2 cannot be served as a MiMo; None when it can.
    One with a module of its own was re-expressed before."""
    size = config["hidden_size"] // config["num_attention_heads"]
    plain = {"head_dim": size, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False,
             **({"attention_bias": False} if config["model_type"] == "llama" else {})}
    return next((f"{key}={config[key]}" for key, value in plain.items() if config.get(key, value) not in
                 (value, None)), None)


def apart(names: Iterable[str]) -> bool:
    """Whether experts have tensors of their own."""
    return any(EXPERT.fullmatch(name) for name in names)


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts that have tensors of their own, stacked as transformers has them: gate_up_proj [E, 2I, H] and
    down_proj [E, H, I]."""
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    matches = [match for name in tensors if (match := EXPERT.fullmatch(name))]
    for start in sorted({match[1] for match in matches}):
        count = 1 + max(int(match[2]) for match in matches if match[1] == start)
        stacks = {part: torch.stack([tensors[f"{start}{expert}.{part}_proj.weight"]
                                     for expert in range(count)]) for part in ("gate", "up", "down")}
        found[f"{start}gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], dim=1)
        found[f"{start}down_proj"] = stacks["down"]
    return found


def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back: every expert's own tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        start, _, part = name.rpartition("mlp.experts.")
        if not start or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        pieces = {"gate": tensor.chunk(2, 1)[0], "up": tensor.chunk(2, 1)[1]} if part == "gate_up_proj" \
            else {"down": tensor}
        found |= {f"{start}mlp.experts.{expert}.{piece}_proj.weight": rows
                  for piece, stack in pieces.items() for expert, rows in enumerate(stack)}
    return found
