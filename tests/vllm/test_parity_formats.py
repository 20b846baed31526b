"""Folders in the layouts of other projects, converted ones, and drafts with a longer context: vLLM's own
classes give our logits for each, as `test_parity_v2.py` has it for the formats of every drafter.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import TOLERANCE, own_logits, random_target, run_worker, spread, states
from tiny import small

from trainer.export.base import Serving
from trainer.export.conversion import Given, convert
from trainer.export.formats import LAYOUTS
from trainer.target import Target

pytestmark = pytest.mark.vllm
WHOLE, THREE = {"draft_vocab_size": None}, {"layers": 1, "tap_layers": [1, 2, 3]}
LONG = 8192  # tokens of context; the random target has 2,048 positions
# A drafter, its settings, the format of its folder, and the one that this is converted to before it is read.
CASES: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "dflash_zlab": ("dflash", WHOLE, "zlab", None), "dflash_sglang": ("dflash", WHOLE, "sglang", None),
    "dflash2_zlab": ("dflash2", {}, "zlab", None), "dspark_deepspec": ("dspark", WHOLE, "deepspec", None),
    "dspark_sglang": ("dspark", WHOLE, "sglang", None),
    "dspark_converted": ("dspark", WHOLE, "deepspec", "speculators"),
    "eagle3_sglang": ("eagle3", {**THREE, "draft_vocab_size": 300}, "sglang", None),
    "eagle3_whole_sglang": ("eagle3", {**THREE, **WHOLE}, "sglang", None),
    "eagle3_converted": ("eagle3", {"layers": 1, "style": "qwen3", **WHOLE}, "deepspec", "native"),
    "dflash_long": ("dflash", {}, "native", None), "eagle3_long": ("eagle3", THREE, "speculators", None)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, target = tmp_path_factory.mktemp("formats"), random_target(tmp_path_factory.mktemp("cache"))
    inputs = states(target)
    save_file(inputs, folder / "inputs.safetensors")
    drafters, plain, cases = {}, {}, []
    for case, (name, settings, form, then) in CASES.items():
        drafter = random_drafter(target, name, **settings)
        drafters[case] = drafter.lengthened(LONG) if case.endswith("_long") else drafter
        plain[case] = own_logits(drafter, inputs)
        serving = Serving(str(target.folder), ["LlamaForCausalLM"], drafter.max_k, target.folder,
                          target.config["num_hidden_layers"])
        LAYOUTS[form].write(folder / case, drafters[case].export(), serving, torch.float32)
        if then is not None:
            convert(folder / case, folder / f"{case}_then", then,
                    Given(str(target.folder), target.folder, k=drafter.max_k))
        alone = (then or form) == "speculators"
        cases.append({"name": case, "method": drafter.method, "target": str(target.folder),
                      "drafter": str(folder / (f"{case}_then" if then else case)),
                      "inputs": str(folder / "inputs.safetensors"), "each_missing": False,
                      "k": None if alone else drafter.max_k})
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder, needs_v2=True)
    return {"ours": {case: own_logits(drafter, inputs) for case, drafter in drafters.items()},
            "drafters": drafters, "found": load_file(folder / "results.safetensors"), "plain": plain,
            "results": json.loads((folder / "results.json").read_text())}


def random_drafter(target: Target, name: str, **settings: Any) -> Any:
    drafter = small(target, name, torch.arange(320) * 7919 % 1000, **settings)
    spread(drafter, 0.15)
    for layer in drafter.layers if name != "eagle3" else ():  # the same everywhere: see `BlockAttention`
        layer.self_attn.k_norm.weight.copy_(drafter.layers[0].self_attn.k_norm.weight)
    return drafter


@pytest.mark.parametrize("case", CASES)
def test_logits_are_ours(made: dict[str, Any], case: str) -> None:
    drafter, expected, result = made["drafters"][case], made["ours"][case], made["results"][case]
    found = made["found"][case][1:, drafter.vocabulary.ids]
    assert result["layers"] == list(drafter.tap_layers) and result["k"] == drafter.max_k
    assert 4 < expected.abs().max() < 500, "the bound below is meant for logits of this scale"
    known = found.isfinite()  # of DFlash2 its candidates
    assert float((found - expected)[known].abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("_long")])
def test_scaled_positions_are_other_positions(made: dict[str, Any], case: str) -> None:
    """Or the comparison above would not see whether they were read."""
    found = float((made["plain"][case] - made["ours"][case]).abs().max())
    assert found > 100 * TOLERANCE
