"""Stage `export`: the folder as a user gets it, the longest draft, and the gate that reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny import OFFLINE, dflash, finished_inputs, make_dflash, make_small, random_samples, small, uneven

from trainer import cpu_build
from trainer.architectures.base import Exported
from trainer.cpu_build import CpuServer
from trainer.errors import GateFailed, UserError
from trainer.export import formats
from trainer.export.described import Described
from trainer.export.hub import HubRepository, HubRuntime
from trainer.export.stage import Export
from trainer.target import Target
from trainer.training import checkpoint
from trainer.training.build import save_counts

SAMPLES = random_samples((30, 22, 17))
SETTINGS = {"layers": 1, "block_size": 8}
CPU = CpuServer("float32", 512, 2)


@pytest.fixture(scope="module")
def inputs(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    train = folder / "train"
    train.mkdir()
    counts = torch.arange(320).flip(0)
    save_counts(train, counts)
    save_file(checkpoint.trained(uneven(dflash(tiny_target, counts, **SETTINGS))),
              train / "weights.safetensors")
    return {**finished_inputs(tiny_target, folder, SAMPLES, heldout=0), "train": train}


def stage(target: Target, **changes: Any) -> Export:
    return Export(**{"target": target, "drafter": make_dflash(**SETTINGS), "source": OFFLINE,
                     "formats": ["speculators", "native"], "dtype": "bfloat16", "default_k": 3,
                     "target_name": None, "cpu_server": CPU, "max_context": None,
                     "trained_modes": ["chat"], "probe_rows": 2, "calibration_drafts": 20,
                     "recipe": "some_recipe", "command": '["train.epochs=2", "run=[export]"]',
                     "hub": HubRepository(None, True, "main", "unknown", HubRuntime(1, 0.0)), **changes})


def test_the_folders_are_complete(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "0123.partial"
    out.mkdir()
    record = stage(tiny_target).run(inputs, out)
    assert record["max_k"] == 7 and record["default_k"] == 3
    assert {name: gate["passed"] for name, gate in record["gates"].items()} == dict.fromkeys(
        ("readback_speculators", "rounding_speculators", "readback_native", "rounding_native"), True)
    exported = json.loads((out / "export.json").read_text())
    for form in ("speculators", "native"):
        assert {path.name for path in (out / form).iterdir()} == {"config.json", "model.safetensors",
                                                                  "README.md", "provenance.json",
                                                                 "speculator.json"}
        facts = json.loads((out / form / "speculator.json").read_text())
        assert facts == {"method": "dflash", "needs_v2": False, "max_k": 7,
                         "possible_k": [1, 2, 3, 4, 5, 6, 7], "default_k": 3,
                         "target": str(tiny_target.folder), "model": "tiny",
                         "target_identity": tiny_target.identity, "template_hash": tiny_target.template_hash,
                         "target_commit": None, "trained_modes": ["chat"], "trained_context": 30,
                         "cpu_server": {"dtype": "float32", "max_model_len": 512, "kv_cache_gib": 2,
                                        "program": "vllm"},
                         "formats": ["speculators", "native"]}
        assert facts.items() <= exported.items()
        readme = (out / form / "README.md").read_text()
        assert str(tmp_path) not in readme and str(tiny_target.folder) not in readme
        assert "vllm serve PATH/TO/tiny --speculative-config" in readme and "vllm serve ." not in readme
        assert "report.html" in readme
        assert "\nVLLM_CPU_KVCACHE_SPACE=2 vllm serve PATH/TO/tiny --dtype float32 --max-model-len " in readme
    on_cpu = exported["serve_commands"]["vllm (CPU build)"]
    assert on_cpu.startswith(f"VLLM_CPU_KVCACHE_SPACE=2 vllm serve {tiny_target.folder} --dtype float32 ")
    assert on_cpu.endswith(exported["serve_commands"]["vllm"].partition("--speculative-config")[2])
    assert exported["serve_commands"]["vllm (short)"] == f"vllm serve {tmp_path / '0123' / 'speculators'}"


def test_the_end_of_a_run_says_what_to_do_next(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    made = stage(tiny_target)
    monkeypatch.setattr(cpu_build, "own_environment", lambda: None)
    (tmp_path / "0123").mkdir()
    made.run(inputs, tmp_path / "0123")
    [note] = [line for line in capsys.readouterr().out.splitlines() if "by the path" in line]
    assert str(tiny_target.folder) in note and "export.target_name=" in note
    (tmp_path / "0123").rename(tmp_path / "moved")
    made.tell(tmp_path / "moved")
    first, second, serve, fused = capsys.readouterr().out.splitlines()
    assert first == f"exported: {tmp_path / 'moved/speculators'}, for any current vLLM"
    assert second.startswith(f"exported: {tmp_path / 'moved/native'}, in the layout of the original authors'")
    assert serve.startswith(f"serve it: vllm serve {tiny_target.folder} --speculative-config ")
    assert f'"model": "{tmp_path}/moved/speculators"' in serve
    assert fused.endswith(f": TRAINER_FUSED_VERIFY=1 {serve.removeprefix('serve it: ')}")
    stage(tiny_target, target_name="org/target").run(inputs, tmp_path / "moved")
    assert "by the path" not in capsys.readouterr().out


def test_where_set_up_made_a_build_for_cpus_its_line_is_told(
        tiny_target: Target, inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    made = stage(tiny_target)
    made.run(inputs, tmp_path)
    told = []
    for place in (tmp_path / "here", Path("/a b")):
        monkeypatch.setattr(cpu_build, "own_environment", lambda place=place: place)
        capsys.readouterr()
        made.tell(tmp_path)
        told += [line for line in capsys.readouterr().out.splitlines() if "CPU build" in line]
    here, there = told
    assert here.startswith("serve it with the CPU build of vLLM that is here: VLLM_CPU_KVCACHE_SPACE=2 "
                           f"{tmp_path}/here/bin/vllm serve {tiny_target.folder} --dtype float32 "
                           "--max-model-len 512 --no-enable-chunked-prefill --speculative-config ")
    assert "=2 '/a b/bin/vllm' serve" in there


def test_no_build_for_cpus_serves_what_needs_the_other_runner(
        tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    train, counts = tmp_path / "train", torch.arange(320).flip(0)
    train.mkdir()
    save_counts(train, counts)
    save_file(checkpoint.trained(uneven(small(tiny_target, "dspark", counts))), train / "weights.safetensors")
    inputs = {**finished_inputs(tiny_target, tmp_path, SAMPLES, heldout=2), "train": train}
    made = stage(tiny_target, drafter=make_small("dspark"))
    made.run(inputs, tmp_path)
    assert "CPU_KVCACHE" not in (tmp_path / "native/README.md").read_text()
    assert "cpu_server" not in json.loads((tmp_path / "native/speculator.json").read_text())
    monkeypatch.setattr(cpu_build, "own_environment", lambda: tmp_path)
    capsys.readouterr()
    made.tell(tmp_path)
    assert "CPU" not in capsys.readouterr().out


def test_a_confidence_is_calibrated_on_held_out_answers(tiny_target: Target, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """Its temperatures lie where no server looks, beside the config that it reads."""
    train, counts = tmp_path / "train", torch.arange(320).flip(0)
    train.mkdir()
    save_counts(train, counts)
    drafter = uneven(small(tiny_target, "dspark", counts))
    save_file(checkpoint.trained(drafter), train / "weights.safetensors")
    inputs = {**finished_inputs(tiny_target, tmp_path, SAMPLES, heldout=2), "train": train}
    record = stage(tiny_target, drafter=make_small("dspark")).run(inputs, tmp_path / "out")
    assert len(record["confidence"]["temperatures"]) == 5 and record["confidence"]["drafts"] > 0
    assert "export: confidence calibrated on" in capsys.readouterr().out
    for form in ("speculators", "native"):
        facts = json.loads((tmp_path / "out" / form / "speculator.json").read_text())
        assert facts["confidence"] == record["confidence"]
        assert "temperatures" not in (tmp_path / "out" / form / "config.json").read_text()


def test_a_published_target_is_named_as_such(tiny_target: Target, inputs: dict[str, Path],
                                             tmp_path: Path) -> None:
    stage(tiny_target, target_name="org/target", formats=["speculators"]).run(inputs, tmp_path)
    config = json.loads((tmp_path / "speculators/config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": "org/target",
                                                        "architectures": ["LlamaForCausalLM"]}
    card = ModelCard((tmp_path / "speculators/README.md").read_text())
    assert (card.data.base_model, card.data.library_name) == ("org/target", "vllm")
    assert card.data.tags == ["speculative-decoding", "speculators", "dflash"]
    assert "\nvllm serve .\n" in card.text and "vllm serve org/target --speculative-config" in card.text


def test_a_target_without_a_public_name_is_no_base_model(tiny_target: Target, inputs: dict[str, Path],
                                                         tmp_path: Path) -> None:
    stage(tiny_target, formats=["native"]).run(inputs, tmp_path)
    card = ModelCard((tmp_path / "native/README.md").read_text())
    assert card.data.base_model is None and card.data.license == "unknown"


def test_a_draft_longer_than_the_block_is_refused_with_the_number(tiny_target: Target) -> None:
    said = "must lie between 1 and 7, the longest draft with drafter.block_size=8, but is"
    assert [stage(tiny_target, default_k=k).check({}) for k in (7, 1, 8)] == [
        {}, {}, {"export.default_k": f"{said} 8"}]


def test_formats_of_other_engines_depend_on_the_settings(tiny_target: Target) -> None:
    """A drafter of the whole vocabulary is held; one of a part of it is refused before it is trained."""
    every = ["speculators", "native", "zlab", "sglang"]
    whole = make_dflash(**SETTINGS, draft_vocab_size=None)
    assert stage(tiny_target, drafter=whole, formats=every).check({}) == {}
    assert stage(tiny_target, formats=every).check({}) == {
        "export.formats": "has zlab, and it has no head of its own, so drafter.draft_vocab_size must be null"}
    assert stage(tiny_target, formats=["deepspec"]).check({})["export.formats"].startswith(
        "must be among speculators, native, zlab, sglang, the formats of this drafter, but has deepspec")


def test_folders_of_other_engines_pass_the_same_gates(tiny_target: Target, inputs: dict[str, Path],
                                                      tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    train, counts = tmp_path / "train", torch.arange(320).flip(0)
    train.mkdir()
    save_counts(train, counts)
    settings = {**SETTINGS, "draft_vocab_size": None}
    save_file(checkpoint.trained(uneven(dflash(tiny_target, counts, **settings))),
              train / "weights.safetensors")
    made = stage(tiny_target, drafter=make_dflash(**settings), formats=["sglang", "zlab"])
    made.preflight()
    record = made.run({**inputs, "train": train}, tmp_path / "out")
    assert {f"readback_{form}" for form in ("sglang", "zlab")} < record["gates"].keys()
    table = capsys.readouterr().out.partition("export: target and draft\n")[2].splitlines()
    assert table[0].split() == ["target", "draft"] and table[1].split() == ["layers", "3", "1"]
    assert any(line.split() == ["after", "layers", "-", "1,", "2"] for line in table)
    assert "sglang.launch_server" in (tmp_path / "out/sglang/README.md").read_text()


def test_a_longer_context_is_written_and_goes_through_the_gates(tiny_target: Target, inputs: dict[str, Path],
                                                                tmp_path: Path) -> None:
    made = stage(tiny_target, max_context=8192)
    made.preflight()
    made.run(inputs, tmp_path)
    for form in ("speculators", "native"):
        config = json.loads((tmp_path / form / "config.json").read_text())
        shape = config.get("transformer_layer_config", config)
        assert shape["max_position_embeddings"] == 8192 and shape["rope_parameters"] == {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 2048}
        assert "| longest context | 8192 tokens, by scaled positions |" in (
            tmp_path / form / "README.md").read_text()
        assert json.loads((tmp_path / form / "speculator.json").read_text())["max_context"] == 8192
    with pytest.raises(UserError, match="export.max_context=2048 must be more than the 2048 positions"):
        stage(tiny_target, max_context=2048).preflight()
    assert stage(tiny_target, drafter=make_small("mtp"), formats=["changes"], max_context=8192,
                 default_k=2).check({})["export.max_context"].startswith("must be null for this drafter")


@pytest.mark.parametrize("k", [7, 1])
def test_the_longest_and_the_shortest_draft_are_fine(tiny_target: Target, inputs: dict[str, Path],
                                                     tmp_path: Path,
                                                     k: int) -> None:
    stage(tiny_target, default_k=k, formats=["speculators"]).run(inputs, tmp_path)
    config = json.loads((tmp_path / "speculators/config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == k


class WithoutRope(formats.Native):
    """Loses the target's rope, as an exporter that relies on a default would."""

    def compose(self, found: Described, serving: formats.Serving) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        return super().compose(found, serving) | {"rope_parameters": rope}


class Shuffled(formats.Native):
    """Puts the key projection where the value projection belongs."""

    def write(self, folder: Path, exported: Exported, serving: formats.Serving, dtype: torch.dtype) -> None:
        weights = dict(exported.weights)
        one, two = (f"layers.0.self_attn.{part}_proj.weight" for part in ("k", "v"))
        weights[one], weights[two] = weights[two], weights[one]
        super().write(folder, Exported(weights, exported.geometry, exported.flavours), serving, dtype)


@pytest.mark.parametrize("wrong", [WithoutRope, Shuffled])
def test_a_folder_that_is_another_drafter_stops_the_run(tiny_target: Target, inputs: dict[str, Path],
                                                        tmp_path: Path,
                                                        wrong: type[formats.Native],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.FORMATS, "native", wrong())
    with pytest.raises(GateFailed,
                       match="gate readback_native failed: .* must be <= 0.0001; likely cause: the "
                                         "exported folder does not describe the trained drafter"):
        stage(tiny_target).run(inputs, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_rounding_costs_is_far_below_its_bound(tiny_target: Target, inputs: dict[str, Path],
                                                    tmp_path: Path, dtype: str) -> None:
    gates = stage(tiny_target, dtype=dtype).run(inputs, tmp_path)["gates"]
    found = gates["rounding_native"]
    assert found["bound"] == 32 * torch.finfo(getattr(torch, dtype)).eps
    assert (found["value"] == 0) if dtype == "float32" else 0 < found["value"] < found["bound"] / 2


def test_weights_that_do_not_survive_the_dtype_stop_the_run(tiny_target: Target, inputs: dict[str, Path],
                                                            tmp_path: Path) -> None:
    """Read back they are what was written, and still no drafter: too small for float16, or too large."""
    weights = load_file(inputs["train"] / "weights.safetensors")
    for scale, value in ((1e-10, "1"), (1e10, "nan")):
        train = tmp_path / f"train{scale}"
        train.mkdir()
        save_counts(train, torch.arange(320).flip(0))
        save_file({name: tensor * scale if name == "norm.weight" else tensor
                   for name, tensor in weights.items()}, train / "weights.safetensors")
        with pytest.raises(GateFailed, match=f"rounding_speculators failed: {value}.*export.dtype=float16"):
            stage(tiny_target, dtype="float16").run({**inputs, "train": train}, tmp_path / f"out{scale}")


def test_weights_of_other_settings_are_refused(tiny_target: Target, inputs: dict[str, Path],
                                               tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not fit the drafter: 11 tensors differ"):
        stage(tiny_target, drafter=make_dflash(**{**SETTINGS, "layers": 2})).run(inputs, tmp_path)
