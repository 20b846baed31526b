"""The config of a Gemma 4 assistant, field by field, from its target's; and whether another assistant is one
of this target and these settings.

Keys and values are the target's, so all that decides their meaning is taken over: head sizes by kind of
attention, the window, rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.errors import UNREADABLE

FULL, SLIDING = "full_attention", "sliding_attention"
ASSISTANTS = {  # by model_type of the target's text part: that of its assistant, and its class
    "gemma4_text": ("gemma4_assistant", "Gemma4AssistantForCausalLM"),
    "gemma4_unified_text": ("gemma4_unified_assistant", "Gemma4UnifiedAssistantForCausalLM")}
NEEDED = ("layer_types", "rope_parameters", "sliding_window", "head_dim", "num_key_value_heads",
          "rms_norm_eps", "max_position_embeddings")
COUNTS = ("sliding_window", "head_dim", "num_key_value_heads", "max_position_embeddings")
REMEDIES = {"layer_types": "drafter.layer_types", "hidden_size": "drafter.hidden_size",
            "num_attention_heads": "drafter.heads", "intermediate_size": "drafter.intermediate_size",
            "num_centroids": "drafter.num_centroids", "centroid_intermediate_top_k": "drafter.centroid_top_k"}
OUTSIDE = ("pre_projection.", "post_projection.", "masked_embedding.")  # of the inner model of a checkpoint
GLOBAL_HEAD_DIM = 512  # of transformers, where a config says nothing


def require_gemma4(config: dict[str, Any]) -> None:
    """Raises ValueError unless this (text) config is that of a Gemma 4 with all that an assistant takes."""
    found = config.get("model_type")
    if found not in ASSISTANTS:
        raise ValueError(f"the target's model_type is {found}, and an assistant reads the keys and values of "
                         f"a Gemma 4 ({', '.join(ASSISTANTS)}); choose such a target "
                         "(target=gemma4_26b_a4b, target=gemma4_31b), or another drafter")
    if missing := [name for name in NEEDED if config.get(name) is None]:
        raise ValueError(f"the target's config.json has no {', '.join(missing)}, so that its keys would be "
                         "misread; write it into the file, or fetch it again")
    wrong = [f"{name} {config[name]!r}" for name in COUNTS
             if type(config[name]) is not int or config[name] < 1]
    wrong += [f"rope_parameters of {kind} {config['rope_parameters']!r}"
              for kind in sorted({*config["layer_types"]}) if not _turns(config, kind)]
    if wrong:
        raise ValueError(f"the target's config.json says {', '.join(wrong)}, with which its keys would be "
                         "misread; mend the file, or fetch it again")


def _turns(config: dict[str, Any], kind: str) -> bool:
    """Whether it says how keys of this kind of attention are turned."""
    try:
        return float(config["rope_parameters"][kind]["rope_theta"]) > 0
    except UNREADABLE:
        return False


def own_kinds(config: dict[str, Any]) -> list[str]:
    """Kinds of attention of the target's layers that have keys and values of their own."""
    return config["layer_types"][:config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)]


def attention_shape(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """Number of key heads, and head dimension, of the layers of this kind, in a config of either form."""
    if (overrides := config.get("per_layer_config")) is not None:
        places = [place for place, each in enumerate(config["layer_types"]) if each == kind]
        found = {str(place): each for place, each in overrides.items()}.get(str(max(places, default=-1)), {})
    elif kind == FULL:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        found = {"head_dim": config.get("global_head_dim") or GLOBAL_HEAD_DIM, "num_key_value_heads": heads}
    else:
        found = {}
    return tuple(found.get(name) or config[name] for name in ("num_key_value_heads", "head_dim"))


def assistant_geometry(config: dict[str, Any], layer_types: Sequence[str], hidden_size: int, heads: int,
                       intermediate_size: int) -> dict[str, Any]:
    """The assistant's `text_config` for a target, or an assistant, with this config; nothing is left to a
    server's defaults."""
    (groups, size), (wide_groups, wide) = (attention_shape(config, kind) for kind in (SLIDING, FULL))
    count = len(layer_types)
    return {"model_type": config["model_type"], "vocab_size": config["vocab_size"],
            "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": count,
            "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size,
            "global_head_dim": wide, "num_global_key_value_heads": wide_groups,
            "attention_k_eq_v": bool(config.get("attention_k_eq_v")), "attention_bias": False,
            "attention_dropout": 0.0, "layer_types": list(layer_types), "num_kv_shared_layers": count,
            "sliding_window": config["sliding_window"], "use_bidirectional_attention": None,
            "rope_parameters": {kind: dict(config["rope_parameters"][kind]) for kind in (SLIDING, FULL)
                                if kind in config["rope_parameters"]},
            "max_position_embeddings": config["max_position_embeddings"],
            "rms_norm_eps": float(config["rms_norm_eps"]), "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": config.get("final_logit_softcapping"), "initializer_range": 0.02,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
            "use_double_wide_mlp": False, "tie_word_embeddings": True}


def assistant_config(text: dict[str, Any], backbone: int, clusters: int | None,
                     chosen: int) -> dict[str, Any]:
    """The whole config.json of an assistant with this `text_config`, for a target of hidden size `backbone`;
    `chosen` of the `clusters` of tokens (null: none) have logits."""
    kind, architecture = ASSISTANTS[text["model_type"]]
    return {"architectures": [architecture], "model_type": kind, "text_config": text,
            "backbone_hidden_size": backbone, "use_ordered_embeddings": clusters is not None,
            "num_centroids": clusters or 1, "centroid_intermediate_top_k": chosen,
            "tie_word_embeddings": True}


def served_name(name: str) -> str:
    """What a tensor of the drafter is called in a checkpoint."""
    return name if name.startswith(OUTSIDE) else f"model.{name}"


def difference(given: dict[str, Any], own: dict[str, Any]) -> str | None:
    """The first key in which the assistant of config.json `given` is not one as `own`; None when its tensors
    mean the same."""
    if given.get("model_type") != own["model_type"]:
        return (f"its model_type is {given.get('model_type')}, expected {own['model_type']}; give the folder "
                "of a Gemma 4 assistant, or null")
    expected = _facts(own)
    try:
        found = _facts(given)
    except UNREADABLE as error:
        return (f"its config.json is not that of an assistant ({type(error).__name__}: {error}); fetch it "
                "again")
    for key in found:
        if found[key] != expected[key]:
            remedy = f"set {REMEDIES[key]} to it" if key in REMEDIES else \
                "it belongs to another target, so begin without it"
            shown = ["null" if each is None else repr(each) for each in (found[key], expected[key])]
            return f"its {key} is {shown[0]}, and here it is {shown[1]}; {remedy}"
    return None


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the meaning of the tensors, that of the target first."""
    text, ordered = config["text_config"], config.get("use_ordered_embeddings", False)
    facts = {"backbone_hidden_size": config["backbone_hidden_size"], "vocab_size": text["vocab_size"],
             "tie_word_embeddings": config.get("tie_word_embeddings", True),
             "layer_types": list(text["layer_types"])}
    for kind in sorted({*text["layer_types"]}):
        rope = text["rope_parameters"][kind]
        facts |= {f"key heads and head_dim of {kind}": attention_shape(text, kind),
                  f"rope_parameters of {kind}": (rope.get("rope_type", "default"), float(rope["rope_theta"]),
                                                 float(rope.get("partial_rotary_factor", 1.0)))}
    if SLIDING in text["layer_types"]:
        facts["sliding_window"] = text["sliding_window"]
    facts |= {name: text[name] for name in ("rms_norm_eps", "hidden_size", "num_attention_heads",
                                            "intermediate_size")}
    return facts | {name: config[name] if ordered else None
                    for name in ("num_centroids", "centroid_intermediate_top_k")}
