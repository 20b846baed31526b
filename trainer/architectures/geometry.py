"""The draft's decoder config, field by field, from the target's."""

from __future__ import annotations

from typing import Any

# of the target's rotary positions: the draft turns whole heads, by positions of text alone, and a server that
# read these would not
OF_THE_TARGET = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
OLDER = {"su": "longrope", "mrope": "default"}  # names of rope types, as servers read them


def geometry(config: dict[str, Any], layers: int, intermediate_size: int | None,
             model_type: str = "qwen3") -> dict[str, Any]:
    """The target's sizes and rotary settings for a draft of `layers` layers in the layout of `model_type`;
    nothing is left to a server's defaults."""
    sizes = {**config, "intermediate_size": intermediate_size or config.get("intermediate_size")}
    missing = [name for name in ("rms_norm_eps", "max_position_embeddings", "intermediate_size")
               if sizes.get(name) is None]
    if missing:
        raise ValueError(f"the target's config.json has no {', '.join(missing)}, so the draft's layers would "
                         "be guessed; write it into the file, or choose a target with RMS norms and rotary "
                         "positions")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ValueError(f"the target's config.json says num_attention_heads {heads} and num_key_value_heads "
                         f"{groups}, expected a multiple; mend it, or fetch it again")
    rope = {key: value for key, value in (config.get("rope_parameters") or config.get("rope_scaling")
                                          or {}).items() if key not in OF_THE_TARGET}
    older, kind = (rope.pop(name, None) for name in ("type", "rope_type"))  # what one key was once called
    older = OLDER.get(older, older)
    if older and kind not in (None, older):
        raise ValueError(f"the target's config.json names two kinds of rotary positions, type {older} and "
                         f"rope_type {kind}, which no server takes; keep the right one as rope_type")
    kind = kind or older or "default"
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("the target's config.json has no rope_theta, so the draft's positions would be "
                         "guessed; write rope_parameters into it")
    return {"model_type": model_type, "hidden_size": config["hidden_size"], "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": groups,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "intermediate_size": intermediate_size or config["intermediate_size"], "hidden_act": "silu",
            "rms_norm_eps": float(config["rms_norm_eps"]), "attention_bias": False, "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": kind, **rope, "rope_theta": float(theta)},
            "max_position_embeddings": config["max_position_embeddings"], "vocab_size": config["vocab_size"],
            "layer_types": ["full_attention"] * layers, "sliding_window": None, "use_sliding_window": False,
            "tie_word_embeddings": False, "initializer_range": 0.02}


def lengthened(shape: dict[str, Any], context: int) -> dict[str, Any]:
    """The geometry of a draft for texts of `context` tokens: YaRN from the length that it has to that one
    (arXiv 2309.00071), both of which are written."""
    rope, length = shape["rope_parameters"], shape["max_position_embeddings"]
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise ValueError(f"export.max_context cannot scale rotary positions of the kind {kind}, which are "
                         "scaled already; set it to null")
    first = rope.get("original_max_position_embeddings")
    if first is None:
        first = length if kind == "default" else round(length / rope["factor"])
    if context <= length:
        raise ValueError(f"export.max_context={context} must be more than the {length} positions that the "
                         "draft has as it is; set it to null")
    scaled = {**rope, "rope_type": "yarn", "factor": context / first,
              "original_max_position_embeddings": first}
    return {**shape, "rope_parameters": scaled, "max_position_embeddings": context}


def require_plain_logits(config: dict[str, Any], addend: str) -> None:
    """Raises ValueError when the target of this (text) config scales or caps its logits: what a method adds
    to the head's, a server would add before it, training behind, and another draft would be served."""
    for key, plain in (("logits_scaling", 1.0), ("final_logit_softcapping", None)):
        if (found := config.get(key, plain)) != plain:
            raise ValueError(f"a drafter that adds {addend} to its logits is not served as trained for a "
                             f"target with {key}={found}; set drafter=dflash or drafter=eagle3")
