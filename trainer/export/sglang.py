"""Format `sglang`: EAGLE-3, DFlash, DFlash2 and DSpark as SGLang reads them; vLLM reads the same folders.

SGLang has EAGLE-3 as one Llama layer (`midlayer`) behind three tapped layers, none of the later flags, with a
head of its own and the target's embedding; it counts the outputs of layers, in `eagle_config`, where vLLM's
newer runner does not look. Of the others it takes neither embedding nor head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.cpu_build import CpuServer
from trainer.export.base import Serving
from trainer.export.deepspec import DeepSpec, dspark_config
from trainer.export.described import FLAGS, NAMES, Described
from trainer.export.layout import Layout
from trainer.export.promised import SHARED, TABLE, membership
from trainer.export.serve_line import Place, sglang_line
from trainer.export.zlab import ZLab, zlab_config


class Sglang(Layout):
    name = "sglang"
    use = "for SGLang, and for vLLM"

    def problem(self, method: str, settings: Mapping[str, Any]) -> str | None:
        if method != "eagle3":
            return (DeepSpec() if method == "dspark" else ZLab()).problem(method, settings)
        if settings["style"] != "llama" or settings["layers"] != 1:
            return "its EAGLE-3 is one Llama layer: drafter.style=llama, drafter.layers=1"
        if on := [name for name in FLAGS if settings[name]]:
            return f"its EAGLE-3 has no {on[0]}, so drafter.{on[0]} must be false"
        if len(settings["tap_layers"]) != 3 or 0 in settings["tap_layers"]:
            return "its EAGLE-3 reads three layers behind the first: give drafter.tap_layers so many"
        return None

    def needs(self, found: Described) -> tuple[str, ...]:
        return SHARED[1:] if found.method == "eagle3" else ()

    def refuses(self, found: Described) -> tuple[str, ...]:
        return SHARED[:1] if found.method == "eagle3" else SHARED

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        line = sglang_line(target, method, folder, lengths["num_speculative_tokens"])
        return {**super().commands(method, folder, target, lengths, cpu), "sglang": line}

    def outgoing(self, found: Described, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if found.method != "eagle3":
            return tensors
        named = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
        if TABLE in named:  # who trains on wants the table of members as well
            named["t2d"] = membership(named[TABLE], found.geometry["vocab_size"])
        return named

    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        own, shape = found.options, found.geometry
        if found.method != "eagle3":
            return dspark_config(found) if found.method == "dspark" else zlab_config(found)
        rope = {name: value for name, value in shape["rope_parameters"].items() if name != "rope_theta"}
        plain = rope["rope_type"] == "default"
        return {**shape, "rope_theta": shape["rope_parameters"]["rope_theta"],
                "rope_scaling": None if plain else rope, "architectures": [NAMES["llama"]],
                "draft_vocab_size": own["draft_vocab_size"],
                "eagle_aux_hidden_state_layer_ids": own["tap_layers"], **{name: own[name] for name in FLAGS},
                "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids":
                                 [layer - 1 for layer in own["tap_layers"]]}}
