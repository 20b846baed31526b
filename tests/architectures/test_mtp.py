"""MTP against its equations in float64, what it begins with, and targets that it cannot be trained for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from slow_decoder import SAMPLES, check_logits, slow_sums
from slow_mtp import PREFIX, SlowMtp
from tiny import copied, make_small, objective, small, states_of, uneven

from trainer.architectures.mtp import Mtp
from trainer.architectures.mtp_layouts import LAYOUTS, fused, layout_of, split
from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.records import Batch
from trainer.target import Folder, Target
from trainer.target_head import load_target_head
from trainer.training.build import require_buildable, require_drafts

STEPS, GAMMA = 4, 3.0


@pytest.fixture(scope="module")
def batch(target: Target) -> Batch:
    return collate(SAMPLES, states_of(target, SAMPLES, [3]), seed=11, device="cpu", tokens=70)


def make(target: Target, **settings: Any) -> Mtp:
    settings["objective"] = objective(settings.get("objective", "ce"), gamma=GAMMA)
    return uneven(small(target, "mtp", **{"anchors": None, **settings}))


def slow_of(drafter: Mtp, target: Target) -> SlowMtp:
    head = load_target_head(target.folder, target.config)
    return SlowMtp(drafter.export(), head.embedding, head.head)


def test_training_and_drafting_have_the_logits_of_the_slow_decoder(target: Target, batch: Batch) -> None:
    drafter = make(target).eval()
    slow = slow_of(drafter, target)
    places = torch.tensor([1, 2, 7, 20, 24 + 1, 37 + 11])
    with torch.no_grad():
        trained = drafter.vocabulary.logits(drafter.drafted(batch, places))
    assert trained.shape[:2] == (6, STEPS)
    check_logits(drafter, slow, batch, places.tolist(), trained)


@pytest.mark.parametrize("term", ["ce", "kl"])
def test_sums_over_a_packed_row_are_those_of_the_slow_decoder(target: Target, batch: Batch,
                                                              term: str) -> None:
    drafter = make(target, objective=term)
    slow, head = slow_of(drafter, target), load_target_head(target.folder, target.config)
    expected = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for document, sample in enumerate(SAMPLES):
        rows = batch.document == document
        tokens, taps = list(sample.tokens), batch.taps[rows]
        teacher = head.logits(batch.last[rows]) if term == "kl" else None
        sums = slow_sums(lambda anchor, tokens=tokens, taps=taps: slow.draft(
            tokens, taps, anchor, STEPS, forced=tokens[anchor + 1:]), range(320), tokens, sample.loss_mask,
            STEPS, GAMMA, teacher, first_anchor=1)
        expected = {name: expected[name] + value for name, value in sums.items()}
    step = drafter.loss(batch)
    length, first = step.ratios["accepted_length"], step.ratios["accepted@1"]
    found = {"loss": float(step.loss_sum.detach()), "count": float(step.count), "first": float(first.total),
             "accepted": float(length.total - length.count), "blocks": float(length.count)}
    assert found == pytest.approx(expected, rel=1e-4) and found["blocks"] == 17 + 6 + 12


def test_the_weights_of_positions_are_those_of_fastmtp() -> None:
    weights = make_small("mtp").keywords["objective"].positions(torch.ones(1, 3, dtype=torch.bool), None)
    assert (weights / weights.sum()).flatten().tolist() == pytest.approx([0.510, 0.306, 0.184], abs=1e-3)


def test_fewer_anchors_are_a_part_of_all(target: Target, batch: Batch) -> None:
    every, few = make(target), make(target, anchors=5)
    (places, valid), (chosen, _) = every.draw(batch), few.draw(batch)
    assert int(valid.sum()) == 35 and set(chosen.tolist()) < set(places[valid].tolist())
    with torch.no_grad():
        one, two = every.drafted(batch, places), few.drafted(batch, chosen)
    rows = [places.tolist().index(place) for place in chosen.tolist()]
    torch.testing.assert_close(one[rows], two, atol=1e-5, rtol=1e-5)


def stitched(target: Target, folder: Path, drafter: Mtp) -> Target:
    """The target with the module inside."""
    serving = Serving("t", [], 2, target.folder)
    FORMATS["stitched"].write(folder, drafter.export(), serving, torch.float32)
    return replace(target, source=Folder(str(folder)))


def test_a_target_s_own_module_is_begun_with(target: Target, batch: Batch, tmp_path: Path) -> None:
    """All of it, and nothing else of the target is read but embedding, final norm and head."""
    first = make(target)
    again = small(stitched(target, tmp_path / "whole", first), "mtp", start="own", anchors=None,
                  objective=first.objective)
    assert torch.equal(first.loss(batch).loss_sum, again.loss(batch).loss_sum)
    with safe_open(tmp_path / "whole/model-00002-of-00002.safetensors", framework="pt") as file:
        added = {*file.keys()}
    assert {name for name in added if name.startswith(PREFIX)} == {
        name for name in again.export().weights if name.startswith(PREFIX)}


def test_a_copy_of_the_last_layer_is_begun_with(target: Target) -> None:
    drafter = small(target, "mtp", start="copy")
    head = load_target_head(target.folder, target.config)
    with safe_open(target.folder / "model.safetensors", framework="pt") as file:
        for part in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            found = drafter.heads[0].block.get_parameter(part)
            assert torch.equal(found, file.get_tensor(f"model.layers.2.{part}"))
    assert torch.equal(drafter.norm.weight, head.norm)
    assert not drafter.heads[0].block.self_attn.q_proj.bias.any()


WRONG = {
    "no module": ({}, {"start": "own"}, r"has no MTP module \(no tensor of its files begins with "
                  r"model.mtp_layers.0.\); set drafter.start=random"),
    "other layers": ({}, {"tap_layers": [2]}, r"drafter.tap_layers=\[2\] must be \[3\], .* set "
                     r"target.tap_layers=\[3\]"),
    "no layout": ({"model_type": "gpt2"}, {}, "model_type gpt2 has no MTP module that is known here"),
    "biases": ({"attention_bias": True}, {}, "in the layout of MiMo, as its config.json says "
               "attention_bias=True"),
    "wide heads": ({"head_dim": 32, "num_key_value_heads": 1}, {}, "its config.json says head_dim=32"),
    "no head": ({"tie_word_embeddings": False}, {}, "has no lm_head.weight, .* so its head is missing"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, {},
                  r"weights are quantised \(quantization_config in its config.json: fp8\)"),
    "another family": ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, {},
                       "drafter.start=random must be own: only a Llama or"),
    "no such activation": ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1, "hidden_act": "nope"},
                           {"start": "own", "steps": 1}, "no MTP module can be made by the target's "
                           r"config.json \(KeyError: 'nope'\); mend it"),
    **{f"{count!r} modules": ({"model_type": "glm4_moe", "num_nextn_predict_layers": count}, {"start": "own"},
                              "config.json says num_nextn_predict_layers .*, by which a server finds no "
                              "MTP module; write the number") for count in (0, -1, None, "2", [1])},
    "no modules of Qwen": ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 0}, {"start": "own"},
                           "config.json says mtp_num_hidden_layers 0, by which a server finds no MTP module"),
    "steps that vLLM refuses": (
        {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}, {"start": "own", "steps": 3},
        r"drafter.steps=3 must be at most 2 or a multiple of it, since vLLM takes no other draft length of a "
        r"target with 2 MTP layers \(mtp_num_hidden_layers in its config.json\)"),
    "too many steps": ({"model_type": "glm4_moe", "num_nextn_predict_layers": 3}, {"start": "own"},
                       "drafter.steps=4 must be at most 3, the target's MTP modules")}


@pytest.mark.parametrize("case", WRONG)
def test_targets_that_it_cannot_be_trained_for(case: str, target: Target, tmp_path: Path) -> None:
    config, settings, text = WRONG[case]
    other = copied(target, tmp_path / "other", config=config)
    with pytest.raises(UserError, match=text):
        require_buildable(make_small("mtp", **settings), other, None)


def test_quantised_may_be_said_in_a_word(target: Target) -> None:
    with pytest.raises(ValueError, match="quantised .quantization_config in its config.json: fp8"):
        layout_of({**target.config, "quantization_config": "fp8"})


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_draft_lengths_that_a_server_takes(kind: str, target: Target) -> None:
    """Up to as many as there are MTP layers, and their multiples; a Llama or Qwen2 gets a single one."""
    config = {**target.config, "model_type": kind, LAYOUTS[kind].count: 3}
    settings = make_small("mtp", start="own").keywords
    taken = [k for k in range(1, 10) if Mtp.served_problem(config, k, **settings) is None]
    assert taken == ([*range(1, 10)] if kind in ("llama", "qwen2") else [1, 2, 3, 6, 9])
    del config[LAYOUTS[kind].count]
    assert Mtp.served_problem(config, 5, **settings) is None


def test_draft_lengths_that_no_server_takes_are_told_by_their_setting(target: Target, tmp_path: Path) -> None:
    other = copied(target, tmp_path / "other",
                   config={"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2})
    made = make_small("mtp", start="own", steps=8)
    require_drafts(made, other, {"evaluate.k.0": 2, "evaluate.k.1": 6})
    with pytest.raises(UserError) as caught:
        require_drafts(made, other, {"evaluate.k.0": 5, "evaluate.k.1": 4, "export.default_k": 7})
    assert re.sub(" must be at most 2 or a multiple of it, since .*", "", str(caught.value)) == (
        "evaluate.k.0=5\nexport.default_k=7")
    require_drafts(make_small("dflash", block_size=9), other, {"evaluate.k.0": 5})


@pytest.mark.parametrize("start", ["random", "copy"])
def test_a_text_model_inside_a_multimodal_one_gets_no_new_module(target: Target, tmp_path: Path,
                                                                 start: str) -> None:
    other = copied(target, tmp_path / "other")
    path = other.folder / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(UserError, match="cannot be trained with this drafter: its text part is nested in the "
                                        "config.json of a multimodal model, .* as a MiMo; give a folder of"):
        require_buildable(make_small("mtp", start=start), other, None)
    require_buildable(make_small("dflash"), other, None)


@pytest.mark.parametrize(("damage", "text"), [
    ("missing", r"1 differ \(0.input_proj.weight: expected \[64, 128\], found none\)"),
    ("another size", r"1 differ \(0.input_proj.weight: expected \[64, 128\], found \[64, 96\]\)"),
    ("eight bits", r"is quantised \(0.input_proj.weight is torch.float8_e4m3fn")])
def test_a_module_that_is_not_what_the_config_promises(target: Target, tmp_path: Path, damage: str,
                                                       text: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{PREFIX}input_proj.weight"
        given = tensors.pop(name)
        if damage != "missing":
            tensors[name] = given[:, :96].contiguous() if damage == "another size" else \
                given.to(torch.float8_e4m3fn)

    from safetensors.torch import load_file, save_file

    whole = stitched(target, tmp_path / "whole", make(target))
    tensors = load_file(tmp_path / "whole/model-00002-of-00002.safetensors")
    spoil(tensors)
    (tmp_path / "whole/model-00002-of-00002.safetensors").unlink()
    save_file(tensors, tmp_path / "whole/model-00002-of-00002.safetensors")
    if damage == "missing":
        (tmp_path / "whole/model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=text):
        require_buildable(make_small("mtp", start="own"), whole, None)


def test_experts_are_taken_apart_as_they_were_stacked() -> None:
    tensors = {f"block.mlp.experts.{expert}.{part}_proj.weight":
               torch.randn((6, 4) if part != "down" else (4, 6)) for expert in range(11)
               for part in ("gate", "up", "down")} | {"norm.weight": torch.ones(4)}
    stacked = fused(tensors)
    assert stacked["block.mlp.experts.gate_up_proj"].shape == (11, 12, 4)
    assert torch.equal(stacked["block.mlp.experts.gate_up_proj"][10, 6:],
                       tensors["block.mlp.experts.10.up_proj.weight"])
    again = split(stacked)
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
