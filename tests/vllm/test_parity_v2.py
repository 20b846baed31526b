"""The DSpark and DFlash2 folders that we export mean to vLLM what they mean to us: its own classes give our
logits, DSpark's confidences, and the scores of DFlash2's candidates.

Both are served by Model Runner V2 alone, so vLLM's interpreter runs with the backend that a server gets
(`parity_worker.py`, as for the other drafters).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import (
    FORMS,
    SEEN,
    TOLERANCE,
    change_mask,
    change_rope,
    export,
    make_causal,
    own_logits,
    parameter_of,
    random_target,
    run_worker,
    shared,
    shift_layers,
    spread,
    states,
)
from tiny import small
from torch import Tensor

from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.pipeline import build
from trainer.target import Target

pytestmark = pytest.mark.vllm
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", {"draft_vocab_size": None}),
    "dspark_reduced": ("dspark", {"draft_vocab_size": 300}),
    "dspark_fill": ("dspark", {"sample_from_anchor": False}),
    "dflash2": ("dflash2", {"conv_kernel_size": 3}),
    "dflash2_wide": ("dflash2", {"conv_group_size": 32, "selector_top_k": 12}),
    "dspark_real": ("dspark", {"draft_vocab_size": 4096, "block_size": 7, "markov_rank": 64}),
    "dflash2_real": ("dflash2", {"block_size": 8, "selector_rank": 64, "selector_top_k": 16})}
CLASSES = {"dspark": "Qwen3DSparkForCausalLM", "dflash2": "DFlash2Qwen3ForCausalLM"}
WHOLE = ("dspark", "dflash2")  # cases of which everything is tried: their folders hold what is theirs alone


def move_anchor(config: dict[str, Any], form: str) -> None:
    config["sample_from_anchor"] = not config["sample_from_anchor"]


MISTAKES: dict[str, dict[str, Callable[[dict[str, Any], str], None]]] = {
    "dspark": {"layers": shift_layers, "rope": change_rope, "mask": change_mask, "anchor": move_anchor},
    "dflash2": {"layers": shift_layers, "rope": change_rope, "mask": change_mask, "causal": make_causal}}
RIGHT = [f"{case}-{form}" for case in CASES for form in FORMS]
WRONG = [(f"{case}-{form}", mistake)
         for case in WHOLE for form in FORMS for mistake in MISTAKES[case]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    targets = {"random": random_target(tmp_path_factory.mktemp("cache")),
               "real": build(compose_configuration(["target=smollm2"], find()).settings["target"])}
    inputs = {name: states(target) for name, target in targets.items()}
    for name, tensors in inputs.items():
        save_file(tensors, folder / f"{name}.safetensors")
    drafters, ours, sure, cases = {}, {}, {}, []
    for case, (name, settings) in CASES.items():
        kind = "real" if case.endswith("_real") else "random"
        target = targets[kind]
        drafters[case] = drafter = random_drafter(target, name, **settings)
        ours[case] = own_logits(drafter, inputs[kind])
        sure[case] = own_confidences(drafter, inputs[kind]) if name == "dspark" else None
        for form in FORMS:
            path = folder / f"{case}-{form}"
            export(drafter, form, path, target)
            paths = [path, *(spoilt(path, form, mistake, change) for mistake, change in MISTAKES[name].items()
                             if case in WHOLE)]
            cases += [{"name": each.name, "method": drafter.method, "target": str(target.folder),
                       "drafter": str(each), "inputs": str(folder / f"{kind}.safetensors"),
                       "k": None if form == "speculators" else drafter.max_k,
                       "each_missing": case in WHOLE and each is path} for each in paths]
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder, needs_v2=True)
    return {"ours": ours, "sure": sure, "drafters": drafters,
            "found": load_file(folder / "results.safetensors"),
            "results": json.loads((folder / "results.json").read_text())}


def random_drafter(target: Target, name: str, **settings: Any) -> Any:
    real = target.config["hidden_size"] > 64
    taps = {"tap_layers": [2, 15, 27]} if real else {}
    counts = torch.arange(target.config["vocab_size"]) * 7919 % 1000
    drafter = small(target, name, counts, **taps, **settings)
    spread(drafter, 0.05 if real else 0.15)
    for layer in drafter.layers:  # the same everywhere: see `BlockAttention`
        layer.self_attn.k_norm.weight.copy_(drafter.layers[0].self_attn.k_norm.weight)
    return drafter


def own_confidences(drafter: Any, inputs: dict[str, Tensor]) -> Tensor:
    taps = torch.cat([inputs[f"layer.{layer}"] for layer in drafter.tap_layers], dim=-1)
    *known, anchor = inputs["tokens"].tolist()
    context = drafter.extend(drafter.new_context(), known, taps)
    return drafter.confidence(context, anchor, drafter.propose(context, anchor, drafter.max_k)).sigmoid()


def spoilt(path: Path, form: str, mistake: str, change: Callable[[dict[str, Any], str], None]) -> Path:
    wrong = path.with_name(f"{path.name}-{mistake}")
    shutil.copytree(path, wrong)
    config = json.loads((wrong / "config.json").read_text())
    change(config, form)
    (wrong / "config.json").write_text(json.dumps(config))
    return wrong


def difference(made: dict[str, Any], right: str, found: str) -> float:
    """The largest one between our logits of `right` and vLLM's of `found`, where vLLM has any."""
    case = right.rpartition("-")[0]
    theirs = made["found"][found][1:, made["drafters"][case].vocabulary.ids]
    return float((theirs - made["ours"][case])[theirs.isfinite()].abs().max())


def test_every_drafter_is_compared_somewhere(project: Path) -> None:
    """The others have modules of their own beside this one."""
    others = {"dflash": "test_parity.py", "eagle3": "test_parity_eagle3.py", "mtp": "test_parity_mtp.py",
              "gemma4_assistant": "test_parity_gemma4.py"}
    assert {path.stem for path in (project / "conf/drafter").glob("*.yaml")} == {*others, *CLASSES}
    assert all(Path(__file__).with_name(name).is_file() for name in others.values())


@pytest.mark.parametrize("case", RIGHT)
def test_logits_along_the_draft_are_ours(made: dict[str, Any], case: str) -> None:
    name = case.rpartition("-")[0]
    drafter, expected, result = made["drafters"][name], made["ours"][name], made["results"][case]
    assert result["class"] == CLASSES[CASES[name][0]]
    assert (result["k"], len(expected)) == (drafter.max_k, drafter.max_k)
    assert (result["layers"], result["mask_token_id"]) == (list(drafter.tap_layers), drafter.mask_token_id)
    assert 4 < expected.abs().max() < 500, "the bound below is meant for logits of this scale"
    assert difference(made, case, case) <= TOLERANCE
    found = made["found"][case][1:]
    ids = drafter.vocabulary.ids
    assert torch.equal(found.argmax(-1), ids[expected.argmax(-1)])
    count = getattr(drafter, "own", {}).get("selector_top_k", len(ids))
    known = ids[expected.topk(count).indices].sort().values
    assert torch.equal(found.isfinite(), torch.zeros_like(found).scatter(1, known, 1.0).bool())


@pytest.mark.parametrize("case", [case for case in RIGHT if case.startswith("dspark")])
def test_confidences_are_ours(made: dict[str, Any], case: str) -> None:
    expected = made["sure"][case.rpartition("-")[0]]
    assert expected.std() > 0.01, "they must tell one slot from another"
    torch.testing.assert_close(made["found"][f"{case}.confidence"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", RIGHT)
def test_only_what_the_target_shares_is_left_unset(made: dict[str, Any], case: str) -> None:
    drafter = made["drafters"][case.rpartition("-")[0]]
    assert sorted(made["results"][case]["unset"]) == shared(drafter)


@pytest.mark.parametrize("case", [f"{case}-{form}" for case in WHOLE for form in FORMS])
def test_every_missing_tensor_is_found(made: dict[str, Any], case: str) -> None:
    drafter, missing = made["drafters"][case.rpartition("-")[0]], made["results"][case]["missing"]
    assert set(missing) == set(drafter.export().weights)
    for tensor, unset in missing.items():
        assert set(unset) - set(shared(drafter)) == {parameter_of(tensor)}, f"without {tensor}"


@pytest.mark.parametrize(("case", "mistake"), WRONG)
def test_a_wrong_folder_is_seen(made: dict[str, Any], case: str, mistake: str) -> None:
    assert difference(made, case, f"{case}-{mistake}") > SEEN
