"""`tools/apply_mtp.py`: the same folder as the export's own, and one sentence for what does not fit."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_targets import random_target
from safetensors.torch import load_file, save_file
from tiny import copied, small, uneven

from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.progress import exit_status
from trainer.target import Target

TOOL = Path(__file__).parents[2] / "tools/apply_mtp.py"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls it as from a shell, in this process: status, output, errors."""
    spec = importlib.util.spec_from_file_location("apply_mtp", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
        capsys.readouterr()  # of fixtures
        return exit_status(tool.main, goes_on=True), *capsys.readouterr()

    return called


@pytest.fixture
def changes(tiny_target: Target, tmp_path: Path) -> Path:
    """As the stage leaves it; beside it lies the stitched folder of the same drafter."""
    exported, serving = uneven(small(tiny_target, "mtp")).export(), Serving("t", [], 2, tiny_target.folder)
    for form in ("changes", "stitched"):
        FORMATS[form].write(tmp_path / form, exported, serving, torch.bfloat16)
    (tmp_path / "changes/speculator.json").write_text(json.dumps({"target_identity": tiny_target.identity}))
    return tmp_path / "changes"


def test_the_folder_is_that_of_the_export(call: Any, changes: Path, tiny_target: Target,
                                          tmp_path: Path) -> None:
    status, out, err = call(changes, tiny_target.folder, tmp_path / "whole")
    assert (status, err) == (0, "")
    assert out.startswith(f"serve it: vllm serve {tmp_path / 'whole'} --speculative-config ")
    names = {path.name for path in (tmp_path / "stitched").iterdir()}
    assert {path.name for path in (tmp_path / "whole").iterdir()} == names
    for name in names - {"mtp.json"}:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stitched" / name).read_bytes()


def refused(result: tuple[int, str, str], text: str, home: Path) -> None:
    status, out, err = result
    assert (status, out) == (2, "") and text in err and len(err.splitlines()) == 1, err
    assert not {"a", "a.partial", "b"} & {path.name for path in home.iterdir()}


def test_what_does_not_fit_is_one_sentence(call: Any, changes: Path, tiny_target: Target,
                                           tmp_path: Path) -> None:
    other = copied(tiny_target, tmp_path / "other", generation_config={"temperature": 0.5})
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "b.partial").mkdir()
    shutil.copytree(tiny_target.folder, tmp_path / "taken")
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    target = tiny_target.folder
    before = {path.name for path in target.iterdir()}
    for arguments, text in (((empty, target, tmp_path / "a"), "empty/config.json cannot be read"),
                            ((target, target, tmp_path / "a"), "config.json says method None; give the"),
                            ((changes, empty, tmp_path / "a"), "has no config.json"),
                            ((changes, target, tmp_path / "b"), "b.partial is there already"),
                            ((changes, target, tmp_path / "taken"), "is there already"),
                            ((changes, target, tmp_path / "dangling"), "dangling is there already"),
                            ((changes, target, "."), "is there already"),
                            ((changes, target, "/"), "/ is there already"),
                            ((changes, target, target / "new"), "which is only read; give the new folder"),
                            ((changes, target, changes / "new"), "which is only read; give the new folder"),
                            ((changes, target, other.folder / "config.json/x"), "cannot be made ([Errno 20]"),
                            ((changes, target, empty / ("x" * 300)), "cannot be made ([Errno 36] File"),
                            ((changes, target, "/proc/a"), "/proc/a cannot be made ("),
                            ((changes, other.folder, tmp_path / "a"), "say --other-weights")):
        refused(call(*arguments), text, tmp_path)
    assert {path.name for path in target.iterdir()} == before
    assert call(changes, other.folder, tmp_path / "a", "--other-weights")[0] == 0
    assert {path.stat().st_mode for path in (tmp_path / "a").glob("*.safetensors")} == {0o100644}


CONFIGS = {  # of a target that is not the one of the module, and what is told
    "hidden_size": (128, "config.json says hidden_size 128"),
    "intermediate_size": (64, "has intermediate_size 64, and the module"),
    "num_key_value_heads": (1, "config.json says num_key_value_heads 1"),
    "hidden_act": ("gelu", "has hidden_act 'gelu', and the module"),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 5.0}, "has rope_parameters {"),
    "rms_norm_eps": (0.1, "has rms_norm_eps 0.1, and the module"),
    "model_type": ("mimo", "cannot take a module: the target's config.json says num_nextn_predict_"),
    "quantization_config": ({"quant_method": "awq"}, "(quantization_config in its config.json: awq)")}


@pytest.mark.parametrize("key", CONFIGS)
def test_another_target_is_told_also_where_no_identity_is_known(call: Any, changes: Path, tmp_path: Path,
                                                                tiny_target: Target, key: str) -> None:
    value, text = CONFIGS[key]
    (changes / "speculator.json").unlink()
    copied(tiny_target, tmp_path / "other", config={key: value})
    refused(call(changes, tmp_path / "other", tmp_path / "a"), text, tmp_path)


RECORDS = [({"steps": "2"}, "says steps '2'"), ({"steps": -1}, "says method 'mtp' and steps -1"),
           ({"method": None}, "says method None"), ({"config_changes": None}, "says config_changes None"),
           ({"config_changes": {}}, "config_changes {}, and"), ({"target_config": []}, "target_config []"),
           ({"target_config": {}}, "has model_type 'qwen2', and the module"),
           ([], "config.json must be a JSON object, but holds a list")]


@pytest.mark.parametrize(("record", "text"), RECORDS)
def test_a_record_of_something_else_is_told(call: Any, changes: Path, tiny_target: Target, tmp_path: Path,
                                            record: Any, text: str) -> None:
    path = changes / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **record} if record else record))
    refused(call(changes, tiny_target.folder, tmp_path / "a"), text, tmp_path)


@pytest.mark.parametrize("facts", ["", "[]", "null", "{}"])
def test_facts_that_say_no_target_are_told(call: Any, changes: Path, tiny_target: Target, tmp_path: Path,
                                           facts: str) -> None:
    (changes / "speculator.json").write_text(facts)
    text = "was trained for (None)" if facts == "{}" else "speculator.json "
    refused(call(changes, tiny_target.folder, tmp_path / "a"), text, tmp_path)


FC, NORM = "model.mtp_layers.0.input_proj.weight", "model.norm.weight"
TENSORS = {  # what becomes of them, and what is told
    "all lost": (dict.clear, "25 tensors of the trained one are not what its config.json promises"),
    "one lost": (lambda tensors: tensors.pop(FC), f"{FC}: expected [64, 128], found none"),
    "one of the target": (lambda tensors: tensors.update({NORM: torch.ones(64)}),
                          f"{NORM}: expected none, found [64]"),
    "no numbers": (lambda tensors: tensors[FC].fill_(torch.nan), f"{FC}: expected finite numbers"),
    "torn": (None, "model.safetensors cannot be read (")}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_something_else_are_told(call: Any, changes: Path, tiny_target: Target, tmp_path: Path,
                                            case: str) -> None:
    change, text = TENSORS[case]
    path = changes / "model.safetensors"
    if change is None:
        path.write_bytes(path.read_bytes()[:200])
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    refused(call(changes, tiny_target.folder, tmp_path / "a"), text, tmp_path)


OTHERS = {  # what is changed in a target with a module of its own, and what is told
    "no module said": ({"num_nextn_predict_layers": 0}, None, "num_nextn_predict_layers 0, by which a"),
    "another family": ({"model_type": "deepseek_v3"}, None, "has model_type 'deepseek_v3', and the module"),
    "more experts": ({"n_routed_experts": 8}, None, "has n_routed_experts 8, and the module"),
    "quantised": ({}, torch.float8_e4m3fn, "tensors of its own one are not what its config.json promises")}


def test_a_target_whose_own_module_is_another_is_told(call: Any, tmp_path: Path) -> None:
    target, changes = random_target("glm4_moe", tmp_path / "glm"), tmp_path / "changes"
    drafter = small(target, "mtp", start="own", steps=2, tap_layers=target.tap_layers)
    FORMATS["changes"].write(changes, drafter.export(), Serving("t", [], 2, target.folder), torch.float32)
    assert call(changes, target.folder, tmp_path / "whole")[0] == 0
    for number, (config, dtype, text) in enumerate(OTHERS.values()):
        other = copied(target, tmp_path / str(number), config=config).folder
        tensors = load_file(other / "mtp.safetensors")
        save_file({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()},
                  other / "mtp.safetensors", metadata={"format": "pt"})
        refused(call(changes, other, tmp_path / "a"), text, tmp_path)


def test_a_full_disk_is_told(call: Any, changes: Path, tiny_target: Target, disk: Path) -> None:
    status, _, err = call(changes, tiny_target.folder, disk / "a")
    assert status == 2 and "No space left on device" in err and len(err.splitlines()) == 1
    assert not list(disk.iterdir())
