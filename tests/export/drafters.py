"""Small drafters in folders of every format that holds them, for the tests of formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import small, uneven

from trainer.architectures.base import Drafter
from trainer.export.base import Serving
from trainer.export.formats import LAYOUTS
from trainer.target import Target

WHOLE = {"draft_vocab_size": None}
THREE = {"layers": 1, "tap_layers": [1, 2, 3]}
# Settings of a drafter, and the formats that hold it.
MADE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dflash": ("dflash", WHOLE, ("speculators", "native", "zlab", "sglang")),
    "dflash_reduced": ("dflash", {}, ("speculators", "native")),
    "dflash2": ("dflash2", {}, ("speculators", "native", "zlab", "sglang")),
    "dspark": ("dspark", {**WHOLE, "sample_from_anchor": True},
               ("speculators", "native", "deepspec", "sglang")),
    "dspark_reduced": ("dspark", {"sample_from_anchor": False}, ("speculators", "native")),
    "eagle3": ("eagle3", THREE, ("speculators", "native", "sglang")),
    "eagle3_whole": ("eagle3", {**THREE, **WHOLE}, ("speculators", "native", "sglang")),
    "eagle3_qwen3": ("eagle3", {"layers": 1, "style": "qwen3", **WHOLE},
                     ("speculators", "native", "deepspec")),
    "eagle3_flags": ("eagle3", {"style": "qwen3", "fc_norm": True, "norm_output": True,
                                "norm_before_residual": True}, ("speculators", "native"))}
HELD = [(name, form) for name, (_, _, forms) in MADE.items() for form in forms]


def made(target: Target, name: str) -> Drafter:
    kind, settings, _ = MADE[name]
    return uneven(small(target, kind, torch.arange(320).flip(0), **settings)).eval().requires_grad_(False)


def serving(target: Target) -> Serving:
    return Serving("org/target", ["LlamaForCausalLM"], 3, target.folder, target.config["num_hidden_layers"])


def written(target: Target, name: str, form: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    LAYOUTS[form].write(folder, made(target, name).export(), serving(target), dtype)
    return folder
