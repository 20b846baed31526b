"""The assistants that we export mean to vLLM what they mean to us: each step of a draft has our logits, from
the same keys and values of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parity import SEEN, TEXT, TOLERANCE, export, run_worker, spread
from tiny import engine, small
from torch import Tensor

from trainer.architectures.gemma4_assistant import Gemma4Assistant
from trainer.architectures.gemma4_geometry import ASSISTANTS
from trainer.records import KeysValues, LastState
from trainer.target import Target
from trainer.target_head import load_target_head

pytestmark = pytest.mark.vllm
STEPS = 4
SLIDING, FULL = "sliding_attention", "full_attention"
TAPS = (LastState(), KeysValues(FULL), KeysValues(SLIDING))
CASES: dict[str, dict[str, Any]] = {
    "two": {}, "four": {"layer_types": [SLIDING, FULL, SLIDING, FULL]}, "full": {"layer_types": [FULL]},
    "wide": {"hidden_size": 96, "heads": 4}, "centroids": {"num_centroids": 32, "centroid_top_k": 4}}


def change_rope(config: dict[str, Any]) -> None:
    config["text_config"]["rope_parameters"][SLIDING]["rope_theta"] /= 10


def change_proportion(config: dict[str, Any]) -> None:
    config["text_config"]["rope_parameters"][FULL]["partial_rotary_factor"] = 1.0


def change_window(config: dict[str, Any]) -> None:
    config["text_config"]["sliding_window"] += 1


def change_cap(config: dict[str, Any]) -> None:
    config["text_config"]["final_logit_softcapping"] = 10.0


def unify(config: dict[str, Any]) -> None:
    """No mistake: the assistant of another kind of target, of the same layers."""
    config["text_config"]["model_type"] = "gemma4_unified_text"
    kind, architecture = ASSISTANTS["gemma4_unified_text"]
    config |= {"model_type": kind, "architectures": [architecture]}


MISTAKES = {each.__name__: each for each in (change_rope, change_proportion, change_window, change_cap)}


@pytest.fixture(scope="module")
def inputs(tiny_gemma4: Target) -> dict[str, Tensor]:
    """A text longer than the window, its last token the anchor, and what the target gives before it."""
    tokens = tiny_gemma4.tokenizer.encode(TEXT)[:48]
    with engine().load(tiny_gemma4.folder, tiny_gemma4.end_ids) as loaded:
        taps = next(loaded.hidden_states([tokens], TAPS)).taps[:-1]
    return {"tokens": torch.tensor(tokens), "taps": taps.contiguous()}


def of(drafter: Gemma4Assistant, inputs: dict[str, Tensor]) -> Tensor:
    """The taps that the drafter reads, of all."""
    hidden = drafter.head.hidden_size
    widths = [hidden, 2 * 2 * 64, 2 * 2 * 32]  # two key heads of 64 and of 32
    parts = dict(zip(TAPS, inputs["taps"].split(widths, dim=-1), strict=True))
    return torch.cat([parts[tap] for tap in drafter.tap_layers], dim=-1)


@pytest.fixture(scope="module")
def made(tiny_gemma4: Target, inputs: dict[str, Tensor],
         tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, cases, drafters, ours = tmp_path_factory.mktemp("gemma4"), [], {}, {}
    head = load_target_head(tiny_gemma4.folder, tiny_gemma4.config)
    *known, anchor = inputs["tokens"].tolist()

    def add(case: str, drafter: Gemma4Assistant) -> Path:
        path, taps = folder / case, of(drafter, inputs)
        export(drafter, "native", path, tiny_gemma4)
        drafters[case] = drafter
        ours[case] = drafter.draft_logits(drafter.extend(drafter.new_context(), known, taps), anchor, STEPS)
        normed = torch.cat([head.normed(taps[:, :64]), taps[:, 64:]], dim=-1)
        save_file({"tokens": inputs["tokens"], "taps": normed}, folder / f"{case}.safetensors")
        cases.append({"name": case, "method": "mtp", "target": str(tiny_gemma4.folder), "drafter": str(path),
                      "inputs": str(folder / f"{case}.safetensors"), "k": STEPS,
                      "each_missing": case == "two"})
        return path

    for case, settings in CASES.items():
        drafter = small(tiny_gemma4, "gemma4_assistant", steps=STEPS, **settings)
        given = [each.clone() for each in drafter.parameters() if not each.is_floating_point()]
        spread(drafter, 0.4)
        for own, kept in zip((each for each in drafter.parameters() if not each.is_floating_point()), given,
                             strict=True):
            own.copy_(kept)
        add(case, drafter)
    for name, change in {**MISTAKES, "unified": unify}.items():
        path = add(name, drafters["two"])
        config = json.loads((path / "config.json").read_text())
        change(config)
        (path / "config.json").write_text(json.dumps(config))
    (folder / "request.json").write_text(json.dumps(cases))
    run_worker(folder)
    return {"ours": ours, "drafters": drafters, "logits": load_file(folder / "results.safetensors"),
            "results": json.loads((folder / "results.json").read_text())}


def scored(ours: Tensor) -> Tensor:
    """Which tokens have logits of their own, [K, V] bool."""
    return ours > ours.amin(-1, keepdim=True)


@pytest.mark.parametrize("case", [*CASES, "unified"])
def test_logits_of_every_step_are_ours(made: dict[str, Any], case: str) -> None:
    expected, found = made["ours"][case], made["logits"][case][1:]
    assert made["results"][case]["class"] == "Gemma4MTP" and made["results"][case]["k"] == STEPS
    inside = scored(expected) if case == "centroids" else torch.ones_like(expected, dtype=torch.bool)
    assert 4 < expected[inside].abs().max() < 500, "the bound below is meant for logits of this scale"
    assert float((found - expected)[inside].abs().max()) <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    if case == "centroids":
        assert inside.sum(-1).eq(4 * 10).all() and found[~inside].eq(torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("case", [*CASES, "unified"])
def test_nothing_is_left_unset(made: dict[str, Any], case: str) -> None:
    assert made["results"][case]["unset"] == []


def test_every_missing_tensor_is_found(made: dict[str, Any]) -> None:
    """But for the scalars of layers, which are no parameters there."""
    missing = made["results"]["two"]["missing"]
    assert set(missing) == set(made["drafters"]["two"].export().weights)
    for tensor, unset in missing.items():
        assert len(unset) == (not tensor.endswith("layer_scalar")), f"without {tensor}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_folder_is_seen(made: dict[str, Any], mistake: str) -> None:
    assert float((made["logits"][mistake][1:] - made["ours"]["two"]).abs().max()) > SEEN
