"""Beginning a block drafter with the backbone of one that was exported, by this project or another.

Backbone: `fc`, the norms, the layers. What a method adds outside them (heads, codebooks) begins as it always
does, and so do convolutions that the other one has not got. Nothing of the backbone is left out: without a
part of it, training would begin with another drafter than the one in the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.architectures.block_layers import BlockLayer
from trainer.architectures.geometry import geometry
from trainer.architectures.tensors import differences
from trainer.errors import UNREADABLE

REMEDIES = {"num_hidden_layers": "set drafter.layers to it", "mask_token_id": "set target.mask_token to it",
            "intermediate_size": "set drafter.intermediate_size to it",
            "tap_layers": "set drafter.tap_layers (target.tap_layers) to them"}
SHARED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
          "rope_parameters", "hidden_act", "vocab_size", "attention_bias", "layer_types")
PARTS = ("fc.", "hidden_norm.", "norm.", "layers.")


def difference(given: dict[str, Any], own: dict[str, Any], taps: Sequence[int],
               mask_token_id: int) -> str | None:
    """The first key in which the drafter of config.json `given` (either flavour) is not one with the geometry
    `own`, these tapped layers and this mask token; None when its tensors mean the same here."""
    try:
        found = facts(given)
    except UNREADABLE as error:
        reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else \
            str(error).replace("the target's", "its") or type(error).__name__
        return f"its config.json is not that of a block drafter ({reason}); give that of one (dflash, ...)"
    expected = {**{key: own[key] for key in SHARED}, "tap_layers": list(taps), "mask_token_id": mask_token_id,
                "num_hidden_layers": own["num_hidden_layers"], "intermediate_size": own["intermediate_size"]}
    for key in (*REMEDIES, *SHARED):  # as many layers before the kinds of layers
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


@torch.no_grad()
def copy_backbone(drafter: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fills the backbone; raises ValueError unless each of its tensors is there, has a place, and finite
    numbers."""
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
