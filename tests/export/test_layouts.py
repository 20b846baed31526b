"""Every format of every method: all keys and tensors as a golden file has them, and read back strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import HELD, MADE, made, serving, written
from safetensors.torch import load_file, save_file
from tiny import random_samples, states_of

from trainer.errors import UserError
from trainer.export.conversion import Given, convert
from trainer.export.formats import FORMATS, LAYOUTS
from trainer.export.sglang import Sglang
from trainer.target import Target
from trainer.target_head import load_target_head

GOLDEN = Path(__file__).with_name("layouts.json")


def seen(folder: Path) -> dict[str, Any]:
    """What a folder has: its config, and name, shape and dtype of each tensor."""
    tensors = {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
               for name, tensor in sorted(load_file(folder / "model.safetensors").items())}
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors}


@pytest.mark.parametrize(("name", "form"), HELD)
def test_keys_and_tensors_are_those_of_the_golden_file(tiny_target: Target, tmp_path: Path, name: str,
                                                       form: str) -> None:
    found = seen(written(tiny_target, name, form, tmp_path, torch.bfloat16))
    expected = json.loads(GOLDEN.read_text())[f"{name}/{form}"]
    assert found["tensors"] == expected["tensors"]
    assert found["config"] == expected["config"]
    assert [*found["config"]] == [*expected["config"]], "in the same order, so that files are equal in bytes"


def test_the_golden_file_has_nothing_else() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == sorted(f"{name}/{form}" for name, form in HELD)


@pytest.mark.parametrize(("name", "form"), HELD)
def test_a_folder_describes_the_drafter_and_vouches_for_every_key(tiny_target: Target, tmp_path: Path,
                                                                  name: str, form: str) -> None:
    drafter = made(tiny_target, name)
    folder = written(tiny_target, name, form, tmp_path / "folder")
    head = load_target_head(tiny_target.folder, tiny_target.config)
    again = type(drafter).restore(FORMATS[form].read(folder), form, head)
    samples = random_samples((20,))
    [state], tokens = states_of(tiny_target, samples, drafter.tap_layers), samples[0].tokens
    one, two = (each.draft_logits(each.extend(each.new_context(), tokens, state.taps), 70, 3)
                for each in (drafter, again))
    assert torch.equal(one, two)
    config = json.loads((folder / "config.json").read_text())
    for key in config:  # without one of them, or with another name, it is no folder of this format
        changed = {**config, f"{key}_": config[key]}
        for wrong in ({name: value for name, value in config.items() if name != key}, changed):
            (folder / "config.json").write_text(json.dumps(wrong))
            with pytest.raises(UserError, match=f"is not a readable {form} speculator"):
                FORMATS[form].read(folder)


@pytest.mark.parametrize(("name", "form"), HELD)
def test_every_tensor_is_needed_in_its_shape(tiny_target: Target, tmp_path: Path, name: str,
                                             form: str) -> None:
    written(tiny_target, name, form, tmp_path)
    right = load_file(tmp_path / "model.safetensors")
    for number, tensor in enumerate(right):
        others = {each: right[each] for each in right if each != tensor}
        wrong = [{**right, tensor: right[tensor].new_zeros((*right[tensor].shape, 1))} if number % 2 else
                 {**right, f"{tensor}.more": right[tensor].clone()}]
        wrong += [others] if tensor != "t2d" else []  # which follows from d2t
        for tensors in wrong:
            save_file(tensors, tmp_path / "model.safetensors")
            with pytest.raises(UserError, match="tensors are not those of its config.json|t2d that does not"):
                LAYOUTS[form].whole(tmp_path)


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][0, 0] = torch.nan


def codes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)


def other_members(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    del tensors["t2d"]


@pytest.mark.parametrize(("damage", "text"), [
    (not_finite, "fc.weight: expected finite numbers"), (codes, "fc.weight: expected .*, found torch.int8"),
    (other_members, "t2d that does not name the tokens of its d2t"),
    (ids, "d2t does not name ascending ids of the target's 320 tokens")])
def test_tensors_with_wrong_values_are_told(tiny_target: Target, tmp_path: Path, damage: Callable[..., None],
                                            text: str) -> None:
    folder = written(tiny_target, "eagle3", "sglang", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=text):
        convert(folder, tmp_path / "place", "native", Given("t", k=2))


@pytest.mark.parametrize(("name", "form", "text"), [
    ("dflash_reduced", "zlab", "draft_vocab_size must be null"), ("dspark", "zlab", "not dspark"),
    ("dflash", "deepspec", "not dflash"), ("dspark_reduced", "deepspec", "sample_from_anchor must be true"),
    ("dspark_reduced", "sglang", "sample_from_anchor must be true"),
    ("eagle3", "deepspec", "drafter.style=qwen3"), ("eagle3_flags", "deepspec", "drafter.layers=1"),
    ("eagle3_flags", "sglang", "drafter.style=llama")])
def test_drafters_that_a_format_cannot_hold_are_refused(tiny_target: Target, tmp_path: Path, name: str,
                                                        form: str, text: str) -> None:
    """By their settings, before training, and by the folder that is to be converted."""
    drafter = made(tiny_target, name)
    with pytest.raises(UserError, match=f"{form} cannot hold this drafter: .*{text}"):
        LAYOUTS[form].write(tmp_path / "folder", drafter.export(), serving(tiny_target), torch.float32)
    assert not (tmp_path / "folder").exists()


def test_commands_for_sglang_name_method_and_folder() -> None:
    lines = Sglang().commands("eagle3", Path("/a b"), "org/target", {"num_speculative_tokens": 3})
    assert lines["sglang"] == ("python -m sglang.launch_server --model-path org/target "
                               "--speculative-algorithm EAGLE3 --speculative-draft-model-path '/a b' "
                               "--speculative-num-steps 3 --speculative-eagle-topk 1 "
                               "--speculative-num-draft-tokens 4")
    assert lines["vllm"].startswith("vllm serve org/target --speculative-config ")
    block = Sglang().commands("dflash", "/s", "t", {"num_speculative_tokens": 3})["sglang"]
    assert "DFLASH" in block and "num-steps" not in block


def test_every_drafter_here_is_held_by_some_other_format() -> None:
    assert {form for _, _, forms in MADE.values() for form in forms} == {*LAYOUTS}
