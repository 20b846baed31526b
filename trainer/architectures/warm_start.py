"""Beginning with a drafter that was exported, by this project or another: a block drafter with the backbone
of one, EAGLE-3 with all of one but its head.

Backbone: `fc`, the norms, the layers. What a method adds outside them (heads, codebooks) begins as it always
does, and so do convolutions that the other one has not got. Nothing of the backbone is left out: without a
part of it, training would begin with another drafter than the one in the folder. Neither is a key that would
have a server compute otherwise, nor a tensor that no method here has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.architectures.block_layers import BlockLayer
from trainer.architectures.geometry import geometry
from trainer.architectures.tensors import differences
from trainer.errors import UNREADABLE

REMEDIES = {"num_hidden_layers": "set drafter.layers to it", "mask_token_id": "set target.mask_token to it",
            "intermediate_size": "set drafter.intermediate_size to it",
            "tap_layers": "set drafter.tap_layers (target.tap_layers) to them",
            "model_type": "set drafter.style to it",
            **{name: f"set drafter.{name} to it" for name in ("norm_before_residual", "norm_before_fc",
                                                              "fc_norm", "norm_output")}}
SHARED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
          "rope_parameters", "hidden_act", "vocab_size", "attention_bias", "layer_types")
PARTS = ("fc.", "hidden_norm.", "norm.", "layers.")
HEADS = ("embed_tokens.", "lm_head.", "d2t", "t2d", "markov_head.", "confidence_head.", "candidate_selector.")
PLAIN = {"is_causal": False, "causal": False, "use_swa": False, "attention_sink_bias": False,
         "attention_value_scale": None, "input_embedding_scale": 1.0, "is_neox_style": True,
         "use_aux_hidden_state": True, "sliding_window_non_causal": True}  # what drafters here always are


def difference(given: dict[str, Any], own: dict[str, Any], taps: Sequence[int],
               mask_token_id: int) -> str | None:
    """The first key in which the drafter of config.json `given` (either flavour) is not one with the geometry
    `own`, these tapped layers and this mask token; None when its tensors mean the same here."""
    expected = {**{key: own[key] for key in SHARED}, "tap_layers": list(taps), "mask_token_id": mask_token_id,
                "num_hidden_layers": own["num_hidden_layers"], "intermediate_size": own["intermediate_size"]}
    return _difference(given, facts, expected, "a block drafter; give that of one (dflash, ...)")


def chain_difference(given: dict[str, Any], own: dict[str, Any], taps: Sequence[int],
                     flags: dict[str, bool]) -> str | None:
    """As `difference`, of EAGLE-3 with these `flags`."""
    names = (*SHARED, "model_type", "num_hidden_layers", "intermediate_size")
    expected = {**{key: own[key] for key in names}, "tap_layers": list(taps), **flags}
    return _difference(given, chain_facts, expected, "EAGLE-3; give that of one")


def _difference(given: dict[str, Any], read: Callable[[dict[str, Any]], dict[str, Any]],
                expected: dict[str, Any], kind: str) -> str | None:
    try:
        found, written = read(given), {**given, **(given.get("dflash_config") or {})}
    except UNREADABLE as error:
        reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else \
            str(error).replace("the target's", "its") or type(error).__name__
        name, _, remedy = kind.partition("; ")
        return f"its config.json is not that of {name} ({reason}); {remedy}"
    for key, plain in PLAIN.items():
        if (value := written.get(key, plain)) != plain:
            return f"its {key} is {value!r}, a feature that no drafter here has; begin without it"
    for key in sorted(expected, key=[*REMEDIES, *SHARED].index):  # as many layers before the kinds of layers
        if found[key] != expected[key]:
            remedy = REMEDIES.get(key, "it belongs to a target of another shape, so begin without it")
            return f"its {key} is {found[key]!r}, and here it is {expected[key]!r}; {remedy}"
    return None


def facts(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the meaning of the tensors, with the defaults of a server where a key is missing."""
    shape = config.get("transformer_layer_config", config)
    inner = {**config, **config.get("dflash_config", {})}
    ids = inner.get("eagle_aux_hidden_state_layer_ids", inner.get("aux_hidden_state_layer_ids"))
    if ids is None:
        ids = [layer + 1 for layer in inner["target_layer_ids"]]
    written = {key: shape[key] for key in ("hidden_act", "attention_bias", "layer_types") if shape.get(key)}
    return {**geometry(shape, shape["num_hidden_layers"], None), **written, "tap_layers": sorted(ids),
            "mask_token_id": inner["mask_token_id"]}


def chain_facts(config: dict[str, Any]) -> dict[str, Any]:
    """As `facts`, of EAGLE-3; its first flag, where it is not written, depends on the flavour."""
    shape, inside = config.get("transformer_layer_config", config), "transformer_layer_config" in config
    if "block_size" in config:  # before its geometry, which could be made the same
        raise ValueError("it has a block_size, as block drafters have")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = [layer + 1 for layer in config["target_layer_ids"]]
    written = {key: shape[key] for key in ("hidden_act", "attention_bias", "layer_types") if shape.get(key)}
    flags = {"norm_before_residual": inside, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    return {**geometry(shape, shape["num_hidden_layers"], None, shape["model_type"]), **written,
            "tap_layers": sorted(ids), **{name: config.get(name, value) for name, value in flags.items()}}


@torch.no_grad()
def copy_chain(drafter: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fills all of EAGLE-3 but its head, which begins as the target's; raises ValueError unless each tensor
    is there, has a place, and finite numbers."""
    own = {name: parameter for name, parameter in drafter.named_parameters()
           if not name.startswith("vocabulary.")}
    given = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()
             if not name.startswith(HEADS)}
    if wrong := differences(own, given):
        raise ValueError(f"{len(wrong)} of its tensors differ from those here ({'; '.join(wrong[:3])}); "
                         "begin with a whole drafter of this method")
    for name, tensor in given.items():
        own[name].copy_(tensor)


@torch.no_grad()
def copy_backbone(drafter: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fills the backbone; raises ValueError unless each of its tensors is there, has a place, and finite
    numbers."""
    if unknown := [name for name in tensors if not name.startswith((*PARTS, *HEADS))]:
        raise ValueError(f"it has tensors of no method here ({', '.join(sorted(unknown)[:3])}); begin with a "
                         "drafter without them")
    own = {name: parameter for name, parameter in drafter.named_parameters() if name.startswith(PARTS)}
    given = {name: tensor for name, tensor in tensors.items() if name.startswith(PARTS)}
    with torch.device("meta"):
        plain = [name for name, _ in BlockLayer(drafter.geometry, torch.add).named_parameters()]
    needed = {name for name in own if not name.startswith("layers.") or name.split(".", 2)[2] in plain}
    if wrong := differences(own, given, optional=own.keys() - needed):
        raise ValueError(f"{len(wrong)} tensors of its backbone differ from those here "
                         f"({'; '.join(wrong[:3])}); begin with a whole drafter of this method or of dflash")
    for name, tensor in given.items():
        own[name].copy_(tensor)
