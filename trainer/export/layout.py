"""Formats of a drafter in a folder of its own: composed from `Described`, field by field, and read strictly.

A folder of one's own is read without any guess: each key that the format has is written and is as the format
would write it, and each tensor is there. Folders of others are read by `tools/convert.py`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.architectures.base import Exported
from trainer.errors import UserError
from trainer.export.base import Format, Serving, in_dtype
from trainer.export.described import BLOCK, CHAIN, FLAGS, NAMES, SELECTOR, Described, Verifier, describe
from trainer.export.promised import SHARED, kept, promised, renamed, require_tensors
from trainer.export.reading import INERT, read_config
from trainer.target import text_part
from trainer.target_head import load_target_head

WEIGHTS = "model.safetensors"
NATIVE = "native"


class Layout(Format):
    @abstractmethod
    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        """config.json, key by key."""

    def needs(self, found: Described) -> tuple[str, ...]:
        """Those of `SHARED` that have to be in the folder, even where they are the target's."""
        return ()

    def refuses(self, found: Described) -> tuple[str, ...]:
        """Those of `SHARED` that an engine would pass by, as it takes the target's."""
        return ()

    def outgoing(self, found: Described, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by the names of the format."""
        return tensors

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return self.compose(own(exported, serving), serving)

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = describe(config, "config.json")
        return found.geometry, native(found)

    def write(self, folder: Path, exported: Exported, serving: Serving, dtype: torch.dtype) -> None:
        self.put(folder, own(exported, serving), in_dtype(exported, dtype), serving)

    def put(self, folder: Path, found: Described, tensors: Mapping[str, Tensor], serving: Serving) -> None:
        """Writes the folder; UserError where the format cannot hold such a drafter."""
        if problem := self.problem(found.method, found.settings):
            raise UserError(f"the format {self.name} cannot hold this drafter: {problem}")
        own, needed = {*SHARED} & tensors.keys() - promised(found).keys(), self.needs(found)
        shared = shared_tensors(serving.folder) if serving.folder and (own or needed) else {}
        held = kept(tensors, shared)
        for name in needed:
            if name not in held and not shared:
                raise UserError(f"the format {self.name} has {name}, and so needs the folder of the target; "
                                "give it with --target")
            held.setdefault(name, shared.get(name))
        if odd := [name for name in self.refuses(found) if name in held]:
            raise UserError(f"the drafter has an own {odd[0]}, which engines of the format {self.name} would "
                            "pass by; give the folder of its target with --target, so that it can be left "
                            "out if it is the target's, or take another format")
        config = self.compose(found, serving)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({name: tensor.contiguous() for name, tensor in self.outgoing(found, held).items()},
                  folder / WEIGHTS, metadata={"format": "pt"})

    def read(self, folder: Path) -> Exported:
        try:
            found, weights = self.whole(folder)
        except (OSError, SafetensorError, UserError) as error:
            raise UserError(f"{folder} is not a readable {self.name} speculator ({type(error).__name__}: "
                            f"{error}); remove {folder.parent} and run the same command again") from error
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor
                   for name, tensor in weights.items()}
        return Exported(weights, found.geometry, {self.name: self.keys(folder, found)})

    def keys(self, folder: Path, found: Described) -> dict[str, Any]:
        """The method's keys as `Drafter.restore` takes them."""
        return native(found)

    def whole(self, folder: Path) -> tuple[Described, dict[str, Tensor]]:
        """The drafter of a folder of this format; UserError for any key or tensor that is missing, unknown,
        or not as the format has it. What its numbers are worth is for the gates to say."""
        config, path = read_config(folder), folder / "config.json"
        found = describe(config, str(path))
        if found.guessed:
            raise UserError(found.guessed[0])
        told = found.verifier or Verifier("", [], 1)
        serving = Serving(told.name, told.architectures, told.k, layers=found.target_layers)
        expected = self.compose(found, serving)
        wrong = [name for name in {**expected, **config} if (name in config) != (name in expected)
                 or (name not in INERT and config[name] != expected[name])]
        if wrong:
            raise UserError(f"{path}: {wrong[0]} is {_shown(config, wrong[0])}, and a folder of this format "
                            f"has {_shown(expected, wrong[0])}; convert it with tools/convert.py")
        weights = renamed(found, load_file(folder / WEIGHTS), str(folder))
        require_tensors(found, weights, str(folder), self.refuses(found), self.needs(found), finite=False)
        return found, weights


def own(exported: Exported, serving: Serving) -> Described:
    """What a drafter that is exported is."""
    found = describe({**exported.geometry, **exported.flavours[NATIVE]}, "the drafter's config")
    return replace(found, target_layers=serving.layers)


def known(exported: Exported) -> bool:
    """Whether `own` can tell."""
    return exported.flavours.get(NATIVE, {}).get("architectures", [""])[0] in {**BLOCK, **CHAIN}


def native(found: Described) -> dict[str, Any]:
    """The method's keys in the layout of its authors as vLLM reads them, which `Drafter.restore` takes."""
    own, taps = found.options, found.options["tap_layers"]
    outputs = [layer - 1 for layer in taps]
    if found.method == "eagle3":
        wide = own["target_hidden_size"]
        return {"architectures": [NAMES[found.geometry["model_type"]]],
                "draft_vocab_size": own["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": taps,
                **{name: own[name] for name in FLAGS},
                **({} if wide == found.geometry["hidden_size"] else {"target_hidden_size": wide})}
    if found.method == "dspark":
        return {"architectures": [NAMES["dspark"]], "block_size": own["block_size"],
                "mask_token_id": own["mask_token_id"], **_rows(own), **heads(own),
                "eagle_aux_hidden_state_layer_ids": taps, "target_layer_ids": outputs}
    inner = {"mask_token_id": own["mask_token_id"], "causal": False, "sample_from_anchor": False,
             **{name: own[name] for name in SELECTOR if name in own}, "target_layer_ids": outputs}
    return {"architectures": [NAMES[found.method]], "block_size": own["block_size"], **_rows(own),
            "eagle_aux_hidden_state_layer_ids": taps, "dflash_config": inner}


def heads(own: Mapping[str, Any]) -> dict[str, Any]:
    """DSpark's keys besides those of its block."""
    return {"sample_from_anchor": own["sample_from_anchor"], "markov_rank": own["markov_rank"],
            "markov_head_type": "vanilla", "enable_confidence_head": own["enable_confidence_head"],
            "confidence_head_with_markov": own["confidence_head_with_markov"]}


def target_count(found: Described) -> int:
    if found.target_layers is None:
        raise UserError("the format names how many layers the target has, which this drafter's folder does "
                        "not say; give --target FOLDER or --target-layers")
    return found.target_layers


def shared_tensors(folder: Path) -> dict[str, Tensor]:
    """The target's embedding and head, by their names in a draft."""
    head = load_target_head(folder, text_part(read_config(folder)))
    return {name: tensor.clone() for name, tensor in zip(SHARED, (head.embedding, head.head), strict=True)}


def _rows(own: Mapping[str, Any]) -> dict[str, int]:
    return {name: own[name] for name in ("draft_vocab_size", "target_hidden_size")}


def _shown(config: Mapping[str, Any], name: str) -> str:
    return json.dumps(config[name])[:80] if name in config else "missing"
