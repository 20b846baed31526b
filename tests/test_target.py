"""Facts of a target, and one sentence for each way in which a folder cannot be used."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import FORKS
from safetensors.torch import load_file, save_file
from tiny import copied

from trainer.errors import UserError
from trainer.target import Folder, Hub, Target, check_folder
from trainer.target_made import Kept, PackagedGguf, RandomGemma4, RandomLlama, _made_once, _require_unchanged


@pytest.fixture
def folder(tiny_target: Target, tmp_path: Path) -> Path:
    return copied(tiny_target, tmp_path / "target").folder


def in_shards(folder: Path) -> None:
    """Splits the weights into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {name: file for file, inside in parts.items() for name in inside}}))
    (folder / "model.safetensors").unlink()


def remove(*patterns: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()
    return change


def lose_a_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def lose_a_tensor(folder: Path) -> None:
    in_shards(folder)
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(("change", "said"), [
    (shutil.rmtree, "has no config.json"),
    (remove("config.json"), "has no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json .*is not valid JSON"),
    (remove("tokenizer*"), r"has no tokenizer \(none of tokenizer.json"),
    (remove("*.safetensors"), "has no safetensors weights; only safetensors is read"),
    (pickled, "has no safetensors weights but pytorch_model.bin, which may run code when they are opened"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../model.safetensors"}}'), "a lies in '../model.safetensors', expected the "),
    (lose_a_shard, r"lacks 1 of the 2 shards .*\(model-00002-of-00002.safetensors\)"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
     "index.json is not as expected: it holds a list"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
     "index.json is not an index"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not as expected: "),
    (lambda folder: (folder / "config.json").write_text('{"hidden_size": 8}'), "says vocab_size None, "),
    (lambda folder: (folder / "tokenizer.json").write_text("{x"), "tokenizer.json is not valid JSON"),
    (lambda folder: (folder / "generation_config.json").write_text("{x"), "config.json is not valid JSON"),
    (lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-10]), "model.safetensors is damaged or not whole"),
    (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
     "model.safetensors is a Git LFS pointer"),
    (lose_a_tensor, "lacks 1 tensors that model.safetensors.index.json says it holds"),
])
def test_an_unusable_folder_is_said_in_one_sentence(folder: Path, change: Callable[[Path], None], said: str,
                                                    tiny_target: Target) -> None:
    change(folder)
    target = replace(tiny_target, source=Folder(str(folder)))
    with pytest.raises(UserError, match=said) as caught:
        _ = target.config
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_in_shards_is_complete(folder: Path) -> None:
    in_shards(folder)
    check_folder(folder)


def test_the_home_folder_may_be_abbreviated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert Folder("~/target").folder() == folder.resolve()


def test_the_text_part_of_a_nested_config_counts(folder: Path, tiny_target: Target) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": config}))
    assert replace(tiny_target, source=Folder(str(folder))).config == config


@pytest.mark.parametrize("token", ["<|mask|>", "<|unused_5|>", 259, 300])
def test_the_mask_token_is_a_text_or_an_id(tiny_target: Target, token: str | int) -> None:
    found = replace(tiny_target, mask_token=token).mask_token_id
    assert found == (token if isinstance(token, int) else tiny_target.tokenizer.convert_tokens_to_ids(token))


@pytest.mark.parametrize(("token", "said"), [
    ("<|nothing|>", "'<|nothing|>' is not one of the 320 rows"), (320, "320 is not one of the 320 rows"),
    (-1, "-1 is not one of"), ("<|im_end|>", "begins or ends tiny's texts"),
    ("<|im_start|>", "begins or ends"), (65, "is an ordinary token of texts, so"),
    ("a", "is an ordinary token of texts")])
def test_another_mask_token_is_refused_with_a_suggestion(tiny_target: Target, token: str | int,
                                                         said: str) -> None:
    with pytest.raises(UserError, match=said.replace("|", r"\|")) as caught:
        _ = replace(tiny_target, mask_token=token).mask_token_id
    suggested = [name for name in tiny_target.unused_tokens() if str(name) in str(caught.value)]
    assert len(suggested) == 4 and "<|im_end|>" not in suggested
    for name in suggested:
        assert replace(tiny_target, mask_token=name).mask_token_id < 320


def test_a_token_of_the_template_is_no_mask(tiny_target: Target, folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# <|unused_5|> #}")
    with pytest.raises(UserError, match=r"\(id \d+\) stands in the chat template, so it has a meaning"):
        _ = replace(tiny_target, source=Folder(str(folder)), mask_token="<|unused_5|>").mask_token_id


def test_stretched_positions_count(tiny_target: Target, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    longer = copied(tiny_target, tmp_path / "longer", config={"rope_parameters": yarn})
    longer.require_length(8192, "any")
    with pytest.raises(UserError, match="any=8193 is more than the 2048 positions"):
        longer.require_length(8193, "any")


def test_rows_beyond_the_tokenizer_are_suggested_first(tiny_target: Target, tmp_path: Path) -> None:
    """The embedding is often larger than the tokenizer; those rows are never emitted by a trained target."""
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.zeros(322, 64)

    larger = copied(tiny_target, tmp_path / "larger", widen, config={"vocab_size": 322})
    assert larger.unused_tokens()[:2] == [320, 321]
    with pytest.raises(UserError, match="for example one of .*320, 321"):
        _ = replace(larger, mask_token="none").mask_token_id
    assert replace(larger, mask_token=321).mask_token_id == 321


def test_ids_at_which_generation_stops_come_from_all_files(tiny_target: Target, tmp_path: Path) -> None:
    assert tiny_target.end_ids == (tiny_target.tokenizer.eos_token_id,)
    more = copied(tiny_target, tmp_path / "more", generation_config={"eos_token_id": [256, 258]},
                  config={"eos_token_id": 256})
    assert more.end_ids == (256, 258)


def changed_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.001)


def test_the_identity_follows_weights_configuration_and_template(tiny_target: Target, tmp_path: Path) -> None:
    same = copied(tiny_target, tmp_path / "same")
    assert same.identity == tiny_target.identity and len(same.identity) == 16
    others = {copied(tiny_target, tmp_path / "weights", changed_weight).identity,
              copied(tiny_target, tmp_path / "config", config={"rms_norm_eps": 1e-5}).identity,
              copied(tiny_target, tmp_path / "ends", generation_config={"eos_token_id": [256, 258]}).identity}
    template = copied(tiny_target, tmp_path / "template")
    path = template.folder / "chat_template.jinja"
    path.write_text(path.read_text() + "\n")
    others.add(template.identity)
    assert len(others) == 4 and tiny_target.identity not in others


def test_the_template_s_hash_follows_its_text_and_arguments(tiny_target: Target) -> None:
    hashes = {replace(tiny_target, template=each).template_hash for each in ({}, {"thinking": True},
                                                                             {"thinking": False})}
    assert len(hashes) == 3
    other = replace(tiny_target)
    other.tokenizer.chat_template += " "
    assert other.template_hash not in hashes


def test_a_target_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="target org/none@main could not be fetched from the Hub .*HF_TOKEN"):
        Hub("org/none", "main").folder()


def test_what_a_branch_leads_to_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is repeated later can name it."""
    commit, home = "0123456789abcdef" * 2 + "01234567", tmp_path / "models--org--branched"
    (home / "snapshots" / commit).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = Hub("org/branched", "main")
    assert source.folder() == source.folder() == home / "snapshots" / commit and source.commit == commit
    assert Hub("org/branched", commit).folder() == source.folder()
    assert capsys.readouterr().out == (f"target: org/branched@main is commit {commit}; "
                                       f"target.source.revision={commit} keeps it\n")


def test_a_missing_gguf_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"package no_such_package is not installed; run `make setup`"):
        PackagedGguf("no_such_package", Kept(str(tmp_path))).folder()
    with pytest.raises(UserError, match="package json holds no .gguf file"):
        PackagedGguf("json", Kept(str(tmp_path))).folder()


def test_a_target_that_is_made_is_made_once_and_whole(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(str(tmp_path)))
    made = source.folder()
    stamps = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert source.folder() == made and {path: path.stat().st_mtime_ns for path in made.iterdir()} == stamps
    check_folder(made)
    again = RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(str(tmp_path / "other"))).folder()
    one, two = (load_file(each / "model.safetensors") for each in (made, again))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert RandomLlama(32, 1, 2, 1, 48, 280, False, 4, 0.2, Kept(str(tmp_path))).folder() != made


def test_a_target_that_was_interrupted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(str(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr("trainer.target_made.byte_tokenizer",
                        lambda size: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            source.folder()
    [left] = (tmp_path / "targets").iterdir()
    assert left.suffix == ".partial"
    check_folder(source.folder())
    assert not left.exists()


def slowly(folder: Path) -> None:
    with (folder.parent / "made").open("a") as file:
        file.write("x")
    time.sleep(0.3)
    (folder / "config.json").write_text("{}")


def make_slowly(cache: Path) -> None:
    _made_once(str(cache), "slow", slowly)


def test_two_that_need_a_target_at_once_make_it_once(tmp_path: Path) -> None:
    both = [FORKS.Process(target=make_slowly, args=(tmp_path,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "targets/made").read_text() == "x"
    assert {path.name for path in (tmp_path / "targets").iterdir()} == {"made", "slow"}
    assert {path.name for path in (tmp_path / "targets/slow").iterdir()} == {"config.json", "made.json"}


def test_a_made_target_that_changed_is_named(tmp_path: Path) -> None:
    source = RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(str(tmp_path)))
    made = source.folder()
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {made.stat().st_mode & 0o666}
    weights = made / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    _require_unchanged.cache_clear()
    with pytest.raises(UserError, match=f"{weights} is not as it was left: .*; remove {made} and run the sa"):
        source.folder()
    (made / "made.json").write_text("{")
    with pytest.raises(UserError, match="made.json cannot be read"):
        source.folder()
    (made / "made.json").unlink()
    assert source.folder() == made, "of an older version: nothing to compare"


def test_a_cache_that_cannot_be(tmp_path: Path) -> None:
    for cache, said in (("", "cache_root= is empty"), ("x" * 300, "cache_root=x+... cannot hold targets")):
        with pytest.raises(UserError, match=said):
            RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(cache)).folder()
    source = RandomLlama(32, 1, 2, 1, 48, 280, False, 3, 0.2, Kept(str(tmp_path)))
    made = source.folder()
    shutil.rmtree(made)
    made.with_name(f"{made.name}.partial").touch()
    with pytest.raises(UserError, match=r"\.partial is a file, expected a folder or nothing; remove it"):
        source.folder()


def test_arguments_of_the_template_decide_the_fingerprint_by_a_hash(tiny_target: Target) -> None:
    """Whatever they are called: settings named like `token` are masked, `runtime` is left out."""
    assert tiny_target.facts == {"target": tiny_target.identity}
    found = [replace(tiny_target, template=given).facts["template"]
             for given in ({"token": "a"}, {"token": "b"}, {"runtime": "a"}, {"runtime": "b"})]
    assert len(set(found)) == 4


def test_sizes_of_a_random_target_that_do_not_go_together(tmp_path: Path) -> None:
    for sizes in ((32, 1, 3, 1), (30, 1, 2, 1), (32, 1, 4, 3)):
        with pytest.raises(UserError, match=f"hidden_size={sizes[0]}, heads={sizes[2]} and .* do not go"):
            RandomLlama(*sizes, 48, 280, False, 3, 0.2, Kept(str(tmp_path))).folder()


def test_a_tokenizer_that_cannot_be_loaded_is_told(tiny_target: Target, folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="the tokenizer in .* cannot be loaded"):
        _ = replace(tiny_target, source=Folder(str(folder))).tokenizer


def test_a_random_gemma4_has_a_layer_of_full_attention_at_its_end(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    right = RandomGemma4(32, kinds, 2, 1, 16, 32, 8, 48, 280, 3, 0.2, Kept(str(tmp_path)))
    config = json.loads((right.folder() / "config.json").read_text())
    assert config["model_type"] == "gemma4_text" and config["layer_types"] == kinds
    with pytest.raises(UserError, match="do not make a Gemma 4: its last layer has full attention"):
        replace(right, kinds=kinds[::-1]).folder()
