"""The EAGLE-3 folders that we export mean to vLLM what they mean to us: each step of a draft has our logits.

All in one process of vLLM's interpreter, as `test_parity.py` for the block drafters: both layouts of a layer,
every flag, more than one layer, other numbers of tapped layers, both formats; and folders that are wrong in
one place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import (
    FORMS,
    SEEN,
    TOLERANCE,
    change_rope,
    export,
    own_logits,
    parameter_of,
    random_target,
    run_worker,
    spread,
    states,
)
from tiny import small
from torch import Tensor

from trainer._paths import find
from trainer.architectures.eagle3 import Eagle3
from trainer.compose import compose_configuration
from trainer.pipeline import build
from trainer.target import Target

pytestmark = pytest.mark.vllm
STEPS = 4
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CASES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"style": "qwen3"}, "whole": {"draft_vocab_size": None},
    "two_layers": {"layers": 2, "style": "qwen3"}, "one_tap": {"tap_layers": [2]},
    "five_taps": {"tap_layers": [0, 1, 2, 3], "style": "qwen3", "fc_norm": True},
    **{flag: {flag: True} for flag in FLAGS}, "qwen3_output": {"style": "qwen3", "norm_output": True},
    "own_head": {"train_head": True}, "own_whole_head": {"train_head": True, "draft_vocab_size": None}}
MISTAKES = ("layers", "rope", *FLAGS[:1], "norm_output")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("eagle3")
    random = random_target(tmp_path_factory.mktemp("cache"))
    real: Target = build(compose_configuration(["target=smollm2"], find()).settings["target"])
    ours, drafters, cases, inputs = {}, {}, [], {}
    for name, target in (("random", random), ("smollm2", real)):
        inputs[name] = states(target)
        save_file(inputs[name], folder / f"{name}.safetensors")

    def add(case: str, target: Target, form: str, drafter: Eagle3, mistake: str | None = None) -> None:
        path = folder / case
        export(drafter, form, path, target)
        drafters[case], ours[case] = drafter, own_logits(drafter, inputs[target.name if target is random
                                                                         else "smollm2"])
        if mistake is not None:
            spoil(path, form, mistake)
        cases.append({"name": case, "method": "eagle3", "target": str(target.folder), "drafter": str(path),
                      "inputs": str(folder / f"{'random' if target is random else 'smollm2'}.safetensors"),
                      "k": None if form == "speculators" else STEPS, "each_missing": case == "llama-native"})

    for case, settings in CASES.items():
        drafter = small(random, "eagle3", steps=STEPS, **{"layers": 1, "draft_vocab_size": 300, **settings})
        spread(drafter, 0.15)
        for form in FORMS:
            add(f"{case}-{form}", random, form, drafter)
            for mistake in MISTAKES if case == "llama" else ():
                add(f"{case}-{form}-{mistake}", random, form, drafter, mistake)
    counts = torch.arange(real.config["vocab_size"]) * 7919 % 1000
    drafter = small(real, "eagle3", counts, layers=1, steps=STEPS, tap_layers=[2, 15, 27],
                    draft_vocab_size=4096)
    spread(drafter, 0.05)
    add("smollm2-speculators", real, "speculators", drafter)
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder)
    return {"ours": ours, "drafters": drafters, "logits": load_file(folder / "results.safetensors"),
            "results": json.loads((folder / "results.json").read_text())}


def spoil(path: Path, form: str, mistake: str) -> None:
    config = json.loads((path / "config.json").read_text())
    if mistake == "rope":
        change_rope(config, form)
    elif mistake == "layers":
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in (1, 2)]
    else:
        config[mistake] = not config[mistake]
    (path / "config.json").write_text(json.dumps(config))


def pair(made: dict[str, Any], case: str) -> tuple[Tensor, Tensor]:
    """Our logits of the right folder and vLLM's, both [K, draft vocabulary]."""
    return made["ours"][case], made["logits"][case][1:, made["drafters"][case].vocabulary.ids]


RIGHT = [f"{case}-{form}" for case in CASES for form in FORMS] + ["smollm2-speculators"]


@pytest.mark.parametrize("case", RIGHT)
def test_logits_of_every_step_are_ours(made: dict[str, Any], case: str) -> None:
    expected, found = pair(made, case)
    layout = made["drafters"][case].style
    assert made["results"][case]["class"] == {"llama": "Eagle3LlamaForCausalLM",
                                              "qwen3": "Eagle3Qwen3ForCausalLM"}[layout]
    assert expected.shape[0] == made["results"][case]["k"] == STEPS
    assert 4 < expected.abs().max() < 500, "the bound below is meant for logits of this scale"
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert made["results"][case]["layers"] == list(made["drafters"][case].tap_layers)


@pytest.mark.parametrize("case", RIGHT)
def test_only_what_the_target_shares_is_left_unset(made: dict[str, Any], case: str) -> None:
    """A layer behind the first one has a norm that nothing reads."""
    drafter = made["drafters"][case]
    shared = [] if "lm_head.weight" in drafter.export().weights else ["lm_head.weight"]
    expected = ["model.embed_tokens.weight", *shared]
    expected += [f"model.layers.{index}.hidden_norm.weight" for index in range(1, len(drafter.layers))]
    assert sorted(made["results"][case]["unset"]) == sorted(expected)


def test_every_missing_tensor_is_found(made: dict[str, Any]) -> None:
    drafter, missing = made["drafters"]["llama-native"], made["results"]["llama-native"]["missing"]
    assert set(missing) == set(drafter.export().weights)
    for tensor, unset in missing.items():
        more = set(unset) - {"model.embed_tokens.weight"}
        assert more == {parameter_of(tensor)}, f"without {tensor}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_folder_is_seen(made: dict[str, Any], form: str, mistake: str) -> None:
    expected, found = pair(made, f"llama-{form}-{mistake}")
    assert float((found - expected).abs().max()) > SEEN
