"""A target with a trained module put back: what changes, what keeps its bytes, and that the source is not
touched."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import copied, make_small, small, uneven, uneven_norms
from transformers import AutoModel, AutoModelForCausalLM

from trainer import _folders
from trainer._weight_files import INDEX
from trainer.architectures.mtp import Mtp
from trainer.errors import UserError
from trainer.export.base import Serving, told
from trainer.export.card import Card
from trainer.export.formats import FORMATS
from trainer.export.stage import Export
from trainer.export.stitched import ADDED, shard_names, stitch
from trainer.target import Target, check_folder
from trainer.target_head import load_target_head, read_tensors, tensor_names

THREE = {"num_speculative_tokens": 3}
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target", uneven_norms)


def make(target: Target, seed: int = 0, **settings: Any) -> Mtp:
    return uneven(small(target, "mtp", **settings), seed).eval()


def write(drafter: Mtp, target: Target, folder: Path, form: str = "stitched",
          dtype: torch.dtype = torch.float32) -> Path:
    FORMATS[form].write(folder, drafter.export(), Serving("t", [], 2, target.folder), dtype)
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for path in folder.iterdir()}


def test_a_llama_with_a_module_is_a_mimo_with_the_same_logits(target: Target, tmp_path: Path) -> None:
    before = contents(target.folder)
    folder = write(make(target), target, tmp_path / "whole")
    assert contents(target.folder) == before
    check_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)(tokens).logits
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                           output_loading_info=True)
        two = model(tokens).logits
    assert torch.equal(one, two)
    assert not told["missing_keys"] and not told["mismatched_keys"], "the biases of zero are read, not made"
    assert {*told["unexpected_keys"]} == {name for name in make(target).export().weights
                                          if ".mtp_layers." in name}


def test_transformers_reads_every_file(target: Target, tmp_path: Path) -> None:
    """Other values than those that it makes itself where it misses a tensor."""
    folder = write(make(target), target, tmp_path / "whole")
    names = [name for name, path in tensor_names(folder).items()
             if path.name == SECOND and name.endswith("self_attn.q_proj.bias") and ".mtp_" not in name]
    tensors = load_file(folder / SECOND)
    (folder / SECOND).unlink()
    save_file(tensors | {name: torch.full_like(tensors[name], 0.5) for name in names}, folder / SECOND,
              metadata={"format": "pt"})
    loaded = AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert len(names) == 3
    assert all(torch.equal(loaded[name.removeprefix("model.")], torch.full((64,), 0.5)) for name in names)


def test_files_are_numbered_where_one_of_them_would_be_read_alone() -> None:
    assert shard_names({"model.safetensors"}, more=False)[0] == {"model.safetensors": "model.safetensors"}
    assert shard_names({"model.safetensors"}, more=True) == (
        {"model.safetensors": "model-00001-of-00002.safetensors"}, "model-00002-of-00002.safetensors")
    assert shard_names({"mtp.safetensors", "model.safetensors"}, more=False)[0] == {
        "model.safetensors": "model-00001-of-00002.safetensors",
        "mtp.safetensors": "model-00002-of-00002.safetensors"}
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert shard_names(shards, more=True) == ({name: name for name in shards}, ADDED)
    assert shard_names({ADDED}, more=True) == ({ADDED: ADDED}, f"more-{ADDED}")


def test_what_stays_is_linked_and_what_is_new_is_in_the_index(target: Target, tmp_path: Path) -> None:
    folder = write(make(target), target, tmp_path / "whole")
    places = tensor_names(folder)
    assert os.path.samefile(folder / FIRST, target.folder / "model.safetensors")
    assert not (folder / "model.safetensors").exists()
    assert os.path.samefile(folder / "tokenizer.json", target.folder / "tokenizer.json")
    assert {name for name, path in places.items() if path.name == SECOND} == {*make(target).export().weights}
    assert places.keys() - make(target).export().weights.keys() == tensor_names(target.folder).keys()
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each
                                                  in read_tensors(folder, places).values())


def test_shards_change_alone_where_their_tensors_do(target: Target, tmp_path: Path) -> None:
    """Trained again from the stitched folder: the module's shard is another, all else the same file."""
    first = copied(target, tmp_path / "first")
    shutil.rmtree(first.folder)
    write(make(target), target, first.folder, dtype=torch.bfloat16)
    before = contents(first.folder)
    again = Target("again", first.source, target.mask_token, [3], {}, 512, False)
    folder = write(make(again, seed=1, start="own"), again, tmp_path / "second", dtype=torch.bfloat16)
    assert contents(first.folder) == before
    assert {path.name for path in folder.iterdir()} == {path.name for path in first.folder.iterdir()}
    same = {path.name for path in folder.iterdir() if os.path.samefile(path, first.folder / path.name)}
    assert same == {*before} - {SECOND, INDEX, "config.json", "mtp.json"}
    assert json.loads((folder / INDEX).read_text()) == json.loads((first.folder / INDEX).read_text())
    old, new = load_file(first.folder / SECOND), load_file(folder / SECOND)
    assert old.keys() == new.keys() and all(each.dtype == torch.bfloat16 for each in new.values())
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if ".mtp_layers." in name}, "zero biases stay"


def test_a_module_among_other_tensors_of_a_shard(target: Target, tmp_path: Path) -> None:
    """The other tensors of the shard keep their bytes, dtype and metadata."""
    first = write(make(target), target, tmp_path / "first")
    tensors = read_tensors(first, tensor_names(first)) | {"odd": torch.arange(7, dtype=torch.int32)}
    for name in (FIRST, SECOND, INDEX):
        (first / name).unlink()
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt", "more": "1"})
    trained = {name: tensor for name, tensor in make(target, seed=1).export().weights.items()
               if ".mtp_layers." in name}
    stitch(first, tmp_path / "second", trained, {"config_changes": {}})
    found = load_file(tmp_path / "second/model.safetensors")
    assert not (tmp_path / "second" / INDEX).exists() and found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, trained.get(name, tensors[name])), name
    with safe_open(tmp_path / "second/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "more": "1"}
    with pytest.raises(UserError, match=r"1 tensors of the trained one are not .* \(odd: expected none"):
        stitch(first, tmp_path / "third", trained | {"odd": torch.zeros(7)}, {"config_changes": {}})
    assert not (tmp_path / "third").exists()


def test_what_a_killed_call_left_is_made_anew(target: Target, tmp_path: Path) -> None:
    """Its links lead into a target, whose files must not be written through them."""
    before = contents(target.folder)
    for seed in (0, 1):
        folder = write(make(target, seed), target, tmp_path / "whole")
    expected = make(target, 1).export().weights
    assert contents(target.folder) == before
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(folder / SECOND).items())


def test_a_shard_of_the_target_by_the_name_of_ours(target: Target, tmp_path: Path) -> None:
    source = copied(target, tmp_path / "source")
    (tmp_path / "source/model.safetensors").rename(tmp_path / "source" / ADDED)
    before = contents(source.folder)
    folder = write(make(source), source, tmp_path / "whole")
    check_folder(folder)
    assert contents(source.folder) == before and os.path.samefile(folder / ADDED, source.folder / ADDED)
    assert tensor_names(folder).keys() == tensor_names(source.folder).keys() | make(source).export().weights


def test_another_disk_gets_copies(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, place: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = write(make(target), target, tmp_path / "whole")
    assert not os.path.samefile(folder / FIRST, target.folder / "model.safetensors")
    assert (folder / FIRST).read_bytes() == (target.folder / "model.safetensors").read_bytes()


def test_files_that_the_folder_shares_keep_their_mode(target: Target, tmp_path: Path) -> None:
    source = copied(target, tmp_path / "source")
    (source.folder / "model.safetensors").chmod(0o600)
    (source.folder / "README.md").write_text("the target's own")
    folder = write(make(source), source, tmp_path / "whole")
    (folder / "README.md").write_text("a card")
    _folders.settle(folder)
    assert (source.folder / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert (source.folder / "README.md").read_text() == "the target's own"


def test_the_changes_alone_are_small_and_complete(target: Target, tmp_path: Path) -> None:
    drafter = make(target)
    folder = write(drafter, target, tmp_path / "changes", "changes")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(folder / "model.safetensors").keys() == drafter.export().weights.keys()
    head = load_target_head(target.folder, target.config)
    again = Mtp.restore(FORMATS["changes"].read(folder), "changes", head)
    assert again.max_k == drafter.max_k
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))


def test_formats_that_a_drafter_has_not_got_are_told(target: Target) -> None:
    settings = {"target": target, "source": None, "dtype": "float32", "default_k": 2, "target_name": None,
                "max_context": None, "trained_modes": [], "cpu_server": None, "probe_rows": 1,
                "calibration_drafts": 2, "recipe": None, "command": None, "hub": None}
    wrong = Export(drafter=make_small("mtp"), formats=["speculators", "stitched"], **settings)
    assert wrong.check({}) == {"export.formats": "must be among stitched, changes, the formats of this "
                                                 f"drafter, but has speculators; {Mtp.needs}"}
    assert Export(drafter=make_small("mtp"), formats=["stitched"], **settings).check({}) == {}
    assert [*Export(drafter=make_small("dflash"), formats=["stitched"], **settings).check({})] == [
        "export.formats"]


def test_commands_serve_the_folder_alone() -> None:
    commands = FORMATS["stitched"].commands("mtp", Path("/a b/whole"), "org/target", THREE)
    line = ("vllm serve '/a b/whole' --speculative-config "
            """'{"method": "mtp", "num_speculative_tokens": 3}'""")
    assert commands == {"vllm": line, "vllm (fused verification)": f"TRAINER_FUSED_VERIFY=1 {line}"}
    changes = FORMATS["changes"].commands("mtp", ".", "org/target", THREE)
    assert changes["apply"] == "python tools/apply_mtp.py . FOLDER_OF_THE_TARGET NEW_FOLDER"
    made = line.replace("'/a b/whole'", "NEW_FOLDER")
    assert told(changes, {})[:2] == [f"put it into the target: {changes['apply']}", f"serve it: {made}"]
    here = FORMATS["changes"].commands("mtp", Path("/a b/changes"), "/my/target", THREE)
    assert here["apply"] == "python tools/apply_mtp.py '/a b/changes' /my/target NEW_FOLDER"


def test_cards_say_what_is_a_whole_model_and_what_no_server_loads() -> None:
    facts = {"method": "mtp", "needs_v2": False, "target": "org/target", "target_identity": "0123",
             "template_hash": "4567", "max_k": 4, "default_k": 2, "trained_modes": ["chat"],
             "cpu_server": {"dtype": "float32", "max_model_len": 512, "kv_cache_gib": 2, "program": "vllm"}}
    whole, changes = (Card(form, facts, "Target").text() for form in ("stitched", "changes"))
    assert "\n# Target with a drafter inside (mtp)\n\nA whole model, and no drafter to be put beside" in whole
    assert "Serve this folder in place of the target." in whole and "\nbase_model: org/target\n" in whole
    draft = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""
    assert f"\nvllm serve . {draft}\n" in whole
    assert "\nVLLM_CPU_KVCACHE_SPACE=2 vllm serve . --dtype float32 --max-model-len 512 " in whole
    assert "\n# Module for Target (mtp)\n" in changes and "No server loads this folder" in changes
    assert "\npython tools/apply_mtp.py . FOLDER_OF_THE_TARGET NEW_FOLDER\n" in changes
    assert f"\nvllm serve NEW_FOLDER {draft}\n" in changes and "A whole model" not in changes
