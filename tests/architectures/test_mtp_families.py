"""Every family that brings an MTP module: what is trained is what is drafted, and what goes back into the
target is what came out of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_targets import FAMILIES, random_target
from safetensors.torch import load_file, save_file
from tiny import copied, make_small, random_samples, small, states_of
from torch import Tensor, nn
from transformers import AutoModel

from trainer._weight_files import INDEX
from trainer.architectures.mtp import Mtp
from trainer.architectures.mtp_layouts import SHARED, layer_config
from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.target import Folder, Target, check_folder
from trainer.target_head import load_target_head, read_tensors, tensor_names
from trainer.training.build import require_buildable

[SAMPLE] = random_samples([30])
ANCHOR = 12
FACTS = {  # whether the token comes first, is zero at position 0, and what is added to weights of norms
    "glm4_moe": (True, True, 0.0), "glm4_moe_lite": (True, True, 0.0), "deepseek_v3": (True, True, 0.0),
    "qwen3_5": (True, False, 1.0), "qwen3_5_moe": (True, False, 1.0), "qwen3_next": (True, False, 1.0)}
Begun = Callable[[str], tuple[Target, Mtp]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """The target of a family, and the drafter that begins with its module."""
    @cache
    def made(family: str) -> tuple[Target, Mtp]:
        target = random_target(family, tmp_path_factory.mktemp("made") / family)
        steps = 2 if family == "two_modules" else 4
        drafter = small(target, "mtp", start="own", steps=steps, tap_layers=target.tap_layers)
        return target, drafter.eval().requires_grad_(False)

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_training_has_the_logits_of_drafting(begun: Begun, family: str) -> None:
    """Where the answer goes on as drafted; also when the context came in pieces."""
    target, drafter = begun(family)
    [states] = states_of(target, [SAMPLE], target.tap_layers)
    taps, tokens = states.taps, list(SAMPLE.tokens)
    context = drafter.new_context()
    for start, end in ((0, 1), (1, 5), (5, ANCHOR)):
        context = drafter.extend(context, tokens[start:end], taps[start:end])
    whole = drafter.extend(drafter.new_context(), tokens[:ANCHOR], taps[:ANCHOR])
    drafted, again = (drafter.draft_logits(each, tokens[ANCHOR], drafter.max_k) for each in (context, whole))
    torch.testing.assert_close(drafted, again, atol=1e-4, rtol=1e-4)
    batch = collate([SAMPLE], [states], seed=0, device="cpu")
    batch.tokens[ANCHOR + 1:ANCHOR + 1 + drafter.max_k] = drafted.argmax(-1)
    trained = drafter.vocabulary.logits(drafter.drafted(batch, torch.tensor([ANCHOR])))[0]
    assert drafted.std() > 0.5
    torch.testing.assert_close(trained, drafted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FACTS)
def test_a_step_is_a_pass_of_the_decoder_of_transformers(begun: Begun, family: str) -> None:
    """A whole model of one layer, its own masks, positions and final norm included, over what a module reads
    at every position, put together here from the family's facts."""
    target, drafter = begun(family)
    token_first, blank, offset = FACTS[family]
    module, eps = drafter.heads[0], target.config["rms_norm_eps"]
    [states] = states_of(target, [SAMPLE], target.tap_layers)
    tokens = torch.tensor(SAMPLE.tokens)
    head = load_target_head(target.folder, target.config)
    token = head.embedding[tokens[1:]]
    if blank:
        token[0] = 0.0
    halves = [normed(token, module.token_norm, offset, eps),
              normed(head.normed(states.taps[:-1]), module.state_norm, offset, eps)]
    read = torch.cat(halves if token_first else halves[::-1], dim=-1) @ module.input_proj.weight.T
    model = AutoModel.from_config(layer_config(drafter.layout, target.config), dtype=torch.float32).eval()
    model.layers[0].load_state_dict(module.block.state_dict())
    model.norm.load_state_dict(module.norm.state_dict())
    with torch.inference_mode():
        expected = model(inputs_embeds=read[None]).last_hidden_state[0]
    for place in (1, 2, 17, 28):
        context = drafter.extend(drafter.new_context(), tokens[:place].tolist(), states.taps[:place])
        found = drafter.draft_logits(context, int(tokens[place]), 1)[0]
        torch.testing.assert_close(found, head.head @ expected[place - 1], atol=1e-4, rtol=1e-4)


def normed(vector: Tensor, norm: nn.Module, offset: float, eps: float) -> Tensor:
    return vector / (vector.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (offset + norm.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_was_trained_changes_in_the_target(begun: Begun, family: str,
                                                     tmp_path_factory: pytest.TempPathFactory) -> None:
    target, drafter = begun(family)
    home, before = tmp_path_factory.mktemp("stitched"), contents(target.folder)
    assert contents(stitched(drafter, target, home / "same")) == before, "untrained, it is as it was"
    exported, trained = drafter.export(), copy.deepcopy(drafter)
    names = {*exported.weights} - exported.exact
    assert names < before.keys() and not [name for name in names if name.endswith(SHARED)]
    for parameter in trained.parameters():
        parameter.add_(1)
    found = contents(stitched(trained, target, home / "trained"))
    check_folder(home / "trained")
    assert found.keys() == before.keys(), "nothing is new, nothing is lost"
    assert {name for name in before if found[name] != before[name]} == names
    assert contents(target.folder) == before
    again = Mtp.restore(FORMATS["stitched"].read(home / "trained"), "stitched",
                        load_target_head(target.folder, target.config))
    require_same(again, trained)
    stitched(drafter, target, home / "rounded", torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in read_tensors(home / "rounded", exported.weights).items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == names


def stitched(drafter: Mtp, target: Target, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    FORMATS["stitched"].write(folder, drafter.export(), Serving("t", [], 2, target.folder), dtype)
    return folder


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a checkpoint, byte by byte."""
    tensors = read_tensors(folder, tensor_names(folder))
    return {name: (tensor.dtype, tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def require_same(one: Mtp, other: Mtp) -> None:
    for name, tensor in one.heads.state_dict().items():
        assert torch.equal(tensor, other.heads.state_dict()[name]), name


def test_the_layers_of_the_target_are_not_read(begun: Begun, tmp_path: Path) -> None:
    """Their shard is gone by then."""
    target, drafter = begun("qwen3_5")
    other = copied(target, tmp_path / "target")
    tensors = load_file(tmp_path / "target/model.safetensors")
    layers = {name: tensor for name, tensor in tensors.items() if ".layers." in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in layers}
    index = json.loads((tmp_path / "target" / INDEX).read_text())
    for file, inside in (("layers.safetensors", layers), ("model.safetensors", rest)):
        save_file(inside, tmp_path / "target" / file)
        index["weight_map"] |= dict.fromkeys(inside, file)
    (tmp_path / "target" / INDEX).write_text(json.dumps(index))
    (other.folder / "layers.safetensors").unlink()
    require_same(begin(other), drafter)


def begin(target: Target) -> Mtp:
    return small(target, "mtp", start="own", tap_layers=target.tap_layers)


def multimodal(target: Target, folder: Path, lost: str | tuple[str, ...] = (), **whole: Any) -> Target:
    """The target as the text part of another one, whose config says `whole` beside it, without the tensors
    whose names begin with `lost`."""
    other, places = copied(target, folder), {}
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config,
        "tie_word_embeddings": False, **whole}))
    for path in folder.glob("*.safetensors"):
        tensors = {name.replace("model.", "model.language_model.", 1): tensor
                   for name, tensor in load_file(path).items() if not name.startswith(lost)}
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return other


def test_a_multimodal_target_has_the_module_beside_its_text_part(begun: Begun, tmp_path: Path) -> None:
    target, drafter = begun("qwen3_5")
    other = multimodal(target, tmp_path / "target")
    again = begin(other)
    require_same(again, drafter)
    folder = stitched(again, other, tmp_path / "stitched")
    check_folder(folder)
    assert contents(folder) == contents(other.folder)
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (other.folder / "config.json").read_text())
    head = load_target_head(folder, replace(other, source=Folder(str(folder))).config)
    require_same(Mtp.restore(FORMATS["stitched"].read(folder), "stitched", head), drafter)


@pytest.mark.parametrize(("lost", "whole", "text"), [
    ("mtp.", {}, r"has no MTP module \(no tensor of its files begins with mtp\.\)"),
    ("lm_head.", {}, "has no lm_head.weight, .* so its head is missing"),
    ((), {"quantization_config": {"quant_method": "fp8"}}, "weights are quantised .* its config.json: fp8")])
def test_a_multimodal_target_that_it_cannot_be_trained_for(begun: Begun, tmp_path: Path, lost: Any,
                                                           whole: dict[str, Any], text: str) -> None:
    other = multimodal(begun("qwen3_5")[0], tmp_path / "target", lost, **whole)
    with pytest.raises(UserError, match=text):
        require_buildable(make_small("mtp", start="own", tap_layers=other.tap_layers), other, None)


EXPERT = "model.layers.2.mlp.experts.2.gate_proj.weight"


@pytest.mark.parametrize(("change", "found"), [
    (lambda tensors: tensors.pop(EXPERT), "none"),
    (lambda tensors: tensors.update({EXPERT: torch.zeros(7, 64)}), r"\[7, 64\]")])
def test_an_expert_that_is_not_as_promised_is_told(begun: Begun, tmp_path: Path, change: Callable[..., Any],
                                                   found: str) -> None:
    target, _ = begun("glm4_moe")
    other = copied(target, tmp_path / "target")
    tensors = load_file(other.folder / "mtp.safetensors")
    change(tensors)
    save_file(tensors, other.folder / "mtp.safetensors")
    index = json.loads((other.folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items()
                           if file != "mtp.safetensors" or name in tensors}
    (other.folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"1 differ \(0\.block\.mlp\.experts\.2\.gate_proj\.weight: expected "
                                        rf"\[32, 64\], found {found}\)"):
        require_buildable(make_small("mtp", start="own", tap_layers=target.tap_layers), other, None)


def test_fewer_modules_than_the_config_promises_are_told(begun: Begun, tmp_path: Path) -> None:
    target, _ = begun("two_modules")
    other = copied(target, tmp_path / "target", config={"num_nextn_predict_layers": 3})
    made = make_small("mtp", start="own", steps=2, tap_layers=target.tap_layers)
    with pytest.raises(UserError, match=r"differ \(2\.block\.\S+: expected \[.+?\], found none"):
        require_buildable(made, other, None)
