"""`tools/apply_mtp.py`: the same folder as the export's own, and one sentence for what does not fit."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_targets import random_target
from safetensors.torch import load_file, save_file
from tiny import OFFLINE, copied, finished_inputs, make_small, random_samples, small, uneven
from tool_calls import Call, caller

from trainer import cpu_build
from trainer.cpu_build import CpuServer
from trainer.export.base import Serving
from trainer.export.checksums import write_checksums
from trainer.export.formats import FORMATS
from trainer.export.hub import HubRepository, HubRuntime
from trainer.export.stage import Export
from trainer.export.tuned import write_tuned
from trainer.target import Target, folder_identity
from trainer.training import checkpoint
from trainer.training.build import save_counts

TWO = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller("apply_mtp", monkeypatch, capsys)


@pytest.fixture(scope="module")
def exported(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished stage export: drafts of up to four tokens, two unless told otherwise."""
    folder, counts = tmp_path_factory.mktemp("run"), torch.arange(320).flip(0)
    train = folder / "train"
    train.mkdir()
    save_counts(train, counts)
    save_file(checkpoint.trained(uneven(small(tiny_target, "mtp", counts))), train / "weights.safetensors")
    inputs = finished_inputs(tiny_target, folder, random_samples((30, 22)), heldout=0, layers=(3,))
    Export(target=tiny_target, drafter=make_small("mtp"), source=OFFLINE, formats=["stitched", "changes"],
           dtype="bfloat16", default_k=2, target_name="org/target", cpu_server=CpuServer("float32", 512, 2),
           max_context=None, trained_modes=["chat"], probe_rows=2, calibration_drafts=2, recipe="some_recipe",
           command="[]", hub=HubRepository(None, True, "main", "unknown", HubRuntime(1, 0.0))).run(
        {**inputs, "train": train}, folder / "export")
    return folder / "export"


@pytest.fixture
def changes(exported: Path, tmp_path: Path) -> Path:
    """As somebody has downloaded it."""
    return shutil.copytree(exported / "changes", tmp_path / "changes")


def test_the_folder_is_that_of_the_export(call: Any, changes: Path, exported: Path, tiny_target: Target,
                                          tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, with card, provenance and the default draft; and it is served by the same commands."""
    monkeypatch.setattr(cpu_build, "own_environment", lambda: Path("/here"))
    status, out, err = call(changes, tiny_target.folder, tmp_path / "whole")
    assert (status, err) == (0, "")
    plain = f"vllm serve {tmp_path / 'whole'} "
    assert out.splitlines()[-3:] == [
        f"serve it: {plain}{TWO}",
        f"serve it with the CPU build of vLLM that is here: VLLM_CPU_KVCACHE_SPACE=2 /here/bin/{plain}"
        f"--dtype float32 --max-model-len 512 --no-enable-chunked-prefill {TWO}",
        f"with fused verification (see the README): TRAINER_FUSED_VERIFY=1 {plain}{TWO}"]
    names = {path.name for path in (exported / "stitched").iterdir()}
    assert {"README.md", "speculator.json", "provenance.json"} < names
    assert {path.name for path in (tmp_path / "whole").iterdir()} == names
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (exported / "stitched" / name).read_bytes(), name


def test_a_tuned_draft_is_the_one_that_is_served(call: Any, changes: Path, tiny_target: Target,
                                                 tmp_path: Path) -> None:
    schedule = [[1, 8, 3], [9, 16, 1]]
    write_tuned(changes, {"default_k": 3, "speculate": True, "speedup": 1.2,
                          "num_speculative_tokens_per_batch_size": schedule})
    status, out, _ = call(changes, tiny_target.folder, tmp_path / "whole")
    draft = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": schedule}
    line = f"--speculative-config '{json.dumps(draft)}'\n"
    assert status == 0 and f"vllm serve {tmp_path / 'whole'} {line}" in out
    card = (tmp_path / "whole/README.md").read_text()
    assert f"\nvllm serve . {line}" in card
    assert "| default draft (K) | 3 |" in card and "## Tuned" in card


def test_what_an_earlier_version_did_not_say_is_done_without(call: Any, changes: Path, tiny_target: Target,
                                                             tmp_path: Path) -> None:
    (changes / "checksums.json").unlink()
    (changes / "provenance.json").unlink()
    facts = json.loads((changes / "speculator.json").read_text())
    for name in ("model", "cpu_server"):
        del facts[name]
    (changes / "speculator.json").write_text(json.dumps(facts))
    refused(call(changes, tiny_target.folder, tmp_path / "a"), "has no checksums.json, as an earlier version",
            tmp_path)
    status, out, _ = call(changes, tiny_target.folder, tmp_path / "whole", "--unchecked")
    assert status == 0 and out.startswith(f"serve it: vllm serve {tmp_path / 'whole'} {TWO}\n")
    assert "CPU build" not in out and not (tmp_path / "whole/provenance.json").exists()
    assert "\n# target with a drafter inside (mtp)\n" in (tmp_path / "whole/README.md").read_text()


def flip(path: Path, place: int) -> str:
    """Changes a byte of a file in place; its SHA-256 from then on."""
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ 1]))
    return sha256(path)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_byte_of_the_target_that_its_identity_does_not_read(call: Any, changes: Path, tiny_target: Target,
                                                              tmp_path: Path) -> None:
    other = copied(tiny_target, tmp_path / "other").folder
    path = other / "model.safetensors"
    size, before = path.stat().st_size, sha256(path)
    after = flip(path, size * 40 // 64 + 4096 + 8)
    assert folder_identity(other) == tiny_target.identity, "else this would be seen without checksums"
    refused(call(changes, other, tmp_path / "a"), (
        f"error: {path} is not the file that the module was trained for: expected {size} bytes of sha256 "
        f"{before}, found {size} bytes of sha256 {after}; fetch the target again, or say --other-weights, "
        "and expect fewer accepted tokens"), tmp_path)
    assert call(changes, other, tmp_path / "whole", "--other-weights")[0] == 0


def test_tensors_that_were_changed_since_the_export(call: Any, changes: Path, tiny_target: Target,
                                                    tmp_path: Path) -> None:
    path = changes / "model.safetensors"
    size, before = path.stat().st_size, sha256(path)
    after, again = flip(path, size - 1), "; copy or download the folder again, or export the module again"
    said = f"error: {path} is not as it was exported: expected {size} bytes of sha256 {before}, found "
    for flags in ([], ["--other-weights"], ["--unchecked"]):
        refused(call(changes, tiny_target.folder, tmp_path / "a", *flags),
                f"{said}{size} bytes of sha256 {after}{again}", tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    refused(call(changes, tiny_target.folder, tmp_path / "a"), f"{said}{size - 9} bytes{again}", tmp_path)


NOTHING = {"bytes": 0, "sha256": "0"}
CHECKSUMS = {"[]": "must be a JSON object, but holds a list", "{}": "(KeyError: 'changes')",
             '{"changes": {}, "target": {}}': "names 0 files of the module and 0 of the target",
             '{"changes": [], "target": {}}': "(AttributeError: ",
             '{"changes": {"model.safetensors": {"bytes": 1}}, "target": {}}': "(TypeError: ",
             json.dumps({"changes": {"model.safetensors": {**NOTHING, "bytes": "1"}}, "target": {}}):
             "(ValueError: bytes '1' and sha256 '0')"}


@pytest.mark.parametrize("content", CHECKSUMS)
def test_checksums_of_something_else_are_told(call: Any, changes: Path, tiny_target: Target, tmp_path: Path,
                                              content: str) -> None:
    (changes / "checksums.json").write_text(content)
    refused(call(changes, tiny_target.folder, tmp_path / "a"), CHECKSUMS[content], tmp_path)


def test_checksums_of_a_target_in_other_files(call: Any, changes: Path, tiny_target: Target,
                                              tmp_path: Path) -> None:
    path = changes / "checksums.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "target": {"model-00001-of-00001.safetensors": NOTHING}}))
    refused(call(changes, tiny_target.folder, tmp_path / "a"), "expected weights in model-00001-of-00001."
            "safetensors, found them in model.safetensors (", tmp_path)


def refused(result: tuple[int, str, str], text: str, home: Path) -> None:
    status, out, err = result
    assert status == 2 and text in err and len(err.splitlines()) == 1, err
    assert all(line.startswith("checksums of the ") for line in out.splitlines()), out
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
def test_another_target_is_told_by_what_differs(call: Any, changes: Path, tmp_path: Path,
                                                tiny_target: Target, key: str) -> None:
    value, text = CONFIGS[key]
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
def test_facts_of_something_else_are_told(call: Any, changes: Path, tiny_target: Target, tmp_path: Path,
                                          facts: str) -> None:
    (changes / "speculator.json").write_text(facts)
    text = "its speculator.json says method None; give" if facts == "{}" else "changes/speculator.json "
    refused(call(changes, tiny_target.folder, tmp_path / "a"), text, tmp_path)
    (changes / "speculator.json").unlink()
    refused(call(changes, tiny_target.folder, tmp_path / "a"), "speculator.json cannot be read (No such file",
            tmp_path)


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
        path.unlink()
        save_file(tensors, path)
    write_checksums(changes, tiny_target.folder)  # as who made it so may have done
    refused(call(changes, tiny_target.folder, tmp_path / "a"), text, tmp_path)


OTHERS = {  # what is changed in a target with a module of its own, and what is told
    "no module said": ({"num_nextn_predict_layers": 0}, None, "num_nextn_predict_layers 0, by which a"),
    "another family": ({"model_type": "deepseek_v3"}, None, "has model_type 'deepseek_v3', and the module"),
    "more experts": ({"n_routed_experts": 8}, None, "has n_routed_experts 8, and the module"),
    "quantised": ({}, torch.float8_e4m3fn, "tensors of its own one are not what its config.json promises")}


def test_a_target_whose_own_module_is_another_is_told(call: Any, exported: Path, tmp_path: Path) -> None:
    target, changes = random_target("glm4_moe", tmp_path / "glm"), tmp_path / "changes"
    drafter = small(target, "mtp", start="own", steps=2, tap_layers=target.tap_layers)
    FORMATS["changes"].write(changes, drafter.export(), Serving("t", [], 2, target.folder), torch.float32)
    write_checksums(changes, target.folder)
    facts = json.loads((exported / "export.json").read_text()) | {"target_identity": target.identity}
    (changes / "speculator.json").write_text(json.dumps(facts))
    assert call(changes, target.folder, tmp_path / "whole")[0] == 0
    for number, (config, dtype, text) in enumerate(OTHERS.values()):
        other = copied(target, tmp_path / str(number), config=config).folder
        tensors = load_file(other / "mtp.safetensors")
        save_file({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()},
                  other / "mtp.safetensors", metadata={"format": "pt"})
        refused(call(changes, other, tmp_path / "a", "--other-weights"), text, tmp_path)


def test_a_full_disk_is_told(call: Any, changes: Path, tiny_target: Target, disk: Path) -> None:
    status, _, err = call(changes, tiny_target.folder, disk / "a")
    assert status == 2 and "No space left on device" in err and len(err.splitlines()) == 1
    assert not list(disk.iterdir())
