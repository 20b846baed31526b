"""Format `native`: the layout of a method's authors, with all that vLLM reads beside it.

DFlash and DFlash2 as z-lab, DSpark as DeepSpec, EAGLE-3 as HF's `LlamaForCausalLMEagle3` (or vLLM's Qwen3
layer); reduced vocabularies and every flag included. Served beside the target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trainer.architectures.base import Exported
from trainer.export.base import Format, Serving
from trainer.export.described import BLOCK, CHAIN, Described
from trainer.export.layout import Layout, known, native


class Native(Layout):
    name = "native"
    use = "in the layout of the original authors' checkpoints"

    def compose(self, found: Described, serving: Serving) -> dict[str, Any]:
        return {**found.geometry, **native(found)}

    def write(self, folder: Path, exported: Exported, serving: Serving, dtype: torch.dtype) -> None:
        if known(exported):
            super().write(folder, exported, serving, dtype)
        else:  # of a drafter that has this layout alone, and whose own `restore` is strict
            Format.write(self, folder, exported, serving, dtype)

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return super().config(exported, serving) if known(exported) else \
            {**exported.geometry, **exported.flavours[self.name]}

    def read(self, folder: Path) -> Exported:
        return super().read(folder) if self._ours(folder) else Format.read(self, folder)

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config, config

    def _ours(self, folder: Path) -> bool:
        try:
            names = json.loads((folder / "config.json").read_text()).get("architectures")
        except (OSError, ValueError, AttributeError, RecursionError):
            return True  # which says what is wrong
        return not (isinstance(names, list) and names and isinstance(names[0], str)
                    and names[0] not in {**BLOCK, **CHAIN})
