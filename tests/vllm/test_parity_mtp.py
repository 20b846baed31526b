"""Targets with an MTP module mean to vLLM what they mean to us: its own classes give our logits, step by
step.

All in one process of vLLM's interpreter. Where its build for CPUs can compute the whole target in float32
(all but the gated delta nets of Qwen), the target's class also tells which state the module is fed with:
before the final norm or behind it. The classes of Qwen3.5 cannot be imported without torchvision, which that
build goes without: `test_mtp_families.py` compares these families with transformers. A server of that build
turns latent attention with unscaled positions (GLM-4.7-Flash) wrongly, see the worker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_targets import FAMILIES, random_target
from safetensors.torch import load_file, save_file
from test_parity import TOLERANCE, run_worker, spread, states
from test_parity import random_target as random_llama
from tiny import make_small
from torch import Tensor

from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import build_drafter

pytestmark = pytest.mark.vllm
STEPS = 4
CLASSES = {"mimo": "MiMoMTP", "glm4_moe": "Glm4MoeMTP", "glm4_moe_lite": "Glm4MoeLiteMTP",
           "deepseek_v3": "DeepSeekMTP", "two_modules": "DeepSeekMTP", "qwen3_next": "Qwen3NextMTP"}
WIDER = {"glm4_moe_lite": 1.5e-4}  # 1.2e-4 was seen, at the first step as at the later ones
WHOLE = [name for name in CLASSES if name != "qwen3_next"]  # of that target only the module is computed there


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mtp")
    cases, ours, fed, drafters = [], {}, {}, {}

    def add(name: str, target: Target, served: Path, start: str) -> None:
        steps = 2 if name == "two_modules" else STEPS
        make = make_small("mtp", steps=steps, start=start, tap_layers=[target.config["num_hidden_layers"]])
        drafter = build_drafter(make, target, torch.ones(320, dtype=torch.int64)).eval()
        inputs = states(target)
        taps = inputs[f"layer.{target.config['num_hidden_layers']}"]
        if start != "own":
            spread(drafter, 0.15)
            FORMATS["stitched"].write(served, drafter.export(), Serving("t", [], 2, target.folder),
                                      torch.float32)
            head = load_target_head(target.folder, target.config)
            drafter = type(drafter).restore(FORMATS["stitched"].read(served), "stitched", head)
        *known, anchor = inputs["tokens"].tolist()
        drafters[name], fed[name] = drafter, drafter.states(taps)
        ours[name] = drafter.draft_logits(drafter.extend(drafter.new_context(), known, taps), anchor, steps)
        save_file({"tokens": inputs["tokens"], "states": fed[name]}, folder / f"{name}.safetensors")
        cases.append({"name": name, "target": str(served), "inputs": str(folder / f"{name}.safetensors"),
                      "k": steps, "whole": name in WHOLE,
                      "latent": "kv_lora_rank" in target.config})

    for name in FAMILIES:  # experts first: vLLM makes their process group with the first model alone
        if name in CLASSES:
            add(name, random_target(name, folder / name), folder / name, "own")
    add("mimo", random_llama(tmp_path_factory.mktemp("cache")), folder / "mimo", "random")
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder, "mtp_worker.py")
    return {"ours": ours, "fed": fed, "found": load_file(folder / "results.safetensors"),
            "results": json.loads((folder / "results.json").read_text())}


@pytest.mark.parametrize("name", CLASSES)
def test_logits_of_every_step_are_ours(made: dict[str, Any], name: str) -> None:
    expected, found = made["ours"][name], made["found"][f"{name}.logits"]
    assert made["results"][name]["class"] == CLASSES[name]
    assert 1 < expected.abs().max() < 500, "the bound below is meant for logits of this scale"
    assert difference(found, expected) <= WIDER.get(name, TOLERANCE)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", WHOLE)
def test_the_target_hands_over_the_states_that_were_trained_on(made: dict[str, Any], name: str) -> None:
    assert difference(made["found"][f"{name}.states"], made["fed"][name]) <= TOLERANCE


@pytest.mark.parametrize("name", CLASSES)
def test_only_what_the_target_shares_is_left_unset(made: dict[str, Any], name: str) -> None:
    shared = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    assert all(each.endswith(shared) for each in made["results"][name]["unset"])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
