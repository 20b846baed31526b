"""Conversion: both ways between all formats of a method, from published layouts, and of broken files."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import MADE, written
from safetensors.torch import load_file, save_file

from trainer._weight_files import INDEX
from trainer.errors import UserError
from trainer.export.conversion import Given, convert, parsed
from trainer.export.described import describe
from trainer.export.formats import LAYOUTS
from trainer.export.promised import promised, require_tensors
from trainer.target import Target

PAIRS = [(name, *pair) for name, (_, _, forms) in MADE.items() for pair in itertools.permutations(forms, 2)]
GEOMETRY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 128, "rms_norm_eps": 1e-5, "vocab_size": 320, "hidden_act": "silu",
            "max_position_embeddings": 2048, "tie_word_embeddings": False}
COPIED = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
          "use_cache": True, "initializer_range": 0.02}
# As published checkpoints of each project have it, small.
PUBLISHED: dict[str, dict[str, Any]] = {
    "zlab": {**GEOMETRY, **COPIED, "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
             "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "rope_theta": 1000000,
             "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "rope_scaling": None, "block_size": 16,
             "layer_types": ["full_attention"], "max_window_layers": 1, "num_target_layers": 36,
             "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
             "dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 17, 33]}},
    "deepspec": {**GEOMETRY, **COPIED, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3",
                 "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
                 "block_size": 7, "mask_token_id": 300, "target_layer_ids": [1, 9, 17], "markov_rank": 8,
                 "num_target_layers": 36, "num_anchors": 512, "markov_head_type": "vanilla",
                 "enable_confidence_head": True, "confidence_head_with_markov": True,
                 "layer_types": ["full_attention"], "attention_bias": False},
    "eagle": {**GEOMETRY, **COPIED, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
              "pad_token_id": 0, "draft_vocab_size": 100, "rope_theta": 500000.0, "pretraining_tp": 1,
              "eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
    "modelopt": {**GEOMETRY, **COPIED, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
                 "head_dim": 16, "draft_vocab_size": 100, "rope_theta": 500000.0, "mlp_bias": False,
                 "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
                 "eagle_config": {"use_aux_hidden_state": True,
                                  "eagle_aux_hidden_state_layer_ids": [1, 17, 32]}},
    "speculators": {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
                    "draft_vocab_size": 100, "norm_before_residual": True, "target_hidden_size": None,
                    "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "speculators_version": "0.9.0",
                    "transformer_layer_config": {**GEOMETRY, "model_type": "llama", "head_dim": 16,
                                                 "rope_parameters": {"rope_type": "default",
                                                                     "rope_theta": 500000.0}},
                    "speculators_config": {
                        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [
                            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5,
                             "verifier_accept_k": 1}],
                        "verifier": {"name_or_path": "org/target", "architectures": ["X"]}}}}
PUBLISHED |= {"deepspec_eagle3": {
    **{key: value for key, value in PUBLISHED["deepspec"].items()
       if key not in ("block_size", "mask_token_id", "markov_rank", "markov_head_type",
                      "enable_confidence_head", "confidence_head_with_markov", "num_anchors")},
    "architectures": ["Qwen3Eagle3Model"], "ttt_length": 7, "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1, "target_model_name_or_path": "Qwen/Qwen3-4B"}}


def published(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with this config and random tensors that fit it, in bfloat16."""
    folder.mkdir()
    config = {**PUBLISHED[name], **changes}
    generator = torch.Generator().manual_seed(1)
    found = describe(PUBLISHED[name], name)
    tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in
               promised(found).items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(100) * 2
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_a_folder_comes_back_in_its_bytes(tiny_target: Target, tmp_path: Path, name: str, first: str,
                                          second: str) -> None:
    one, other = (written(tiny_target, name, form, tmp_path / form, torch.bfloat16)
                  for form in (first, second))
    (one / "speculator.json").write_text('{"default_k": 3}')
    given = Given("org/target", tiny_target.folder, k=3)
    convert(one, tmp_path / "there", second, given)
    convert(tmp_path / "there", tmp_path / "back", first, given)
    for file in ("config.json", "model.safetensors", "speculator.json"):
        assert (tmp_path / "back" / file).read_bytes() == (one / file).read_bytes(), file
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "there" / file).read_bytes() == (other / file).read_bytes(), f"as exported, {file}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_become_folders_that_vouch_for_every_key(name: str, tmp_path: Path) -> None:
    source = published(name, tmp_path / "source")
    lines = convert(source, tmp_path / "native", "native", Given(target="org/target", k=3))
    found, weights = LAYOUTS["native"].whole(tmp_path / "native")
    before = describe(PUBLISHED[name], name)
    assert (found.method, found.geometry, found.options) == (before.method, before.geometry, before.options)
    assert found.guessed == () and found.options["tap_layers"][:2] == ([2, 18] if name[:8] != "deepspec"
                                                                       else [2, 10])
    for key, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(weights[key], tensor) and weights[key].dtype == tensor.dtype
    text = "\n".join(lines)
    assert "left out, as no engine reads that of a draft" in text
    assert "after layers" in text and "rope_theta" in text, "the table"
    for each in before.guessed:
        assert each.split(": ", 1)[1] in text, "what is taken without being written is told"


def test_what_a_published_file_leaves_out_is_taken_as_its_engine_does(tmp_path: Path) -> None:
    found = describe(PUBLISHED["speculators"], "c")
    assert found.options["norm_before_residual"] and found.verifier and found.verifier.k == 5
    del PUBLISHED["speculators"]["norm_before_residual"]
    try:
        assert describe(PUBLISHED["speculators"], "c").options["norm_before_residual"] is True
    finally:
        PUBLISHED["speculators"]["norm_before_residual"] = True
    eagle = describe(PUBLISHED["eagle"], "c")
    assert eagle.options["norm_before_residual"] is False and eagle.geometry["head_dim"] == 16
    assert any("norm_before_residual is not written, which means false" in note for note in eagle.guessed)
    dspark = describe(PUBLISHED["deepspec"], "c")
    assert dspark.options["sample_from_anchor"] is True and dspark.longest == 7
    assert describe(PUBLISHED["zlab"], "c").longest == 15


def test_keys_that_one_project_nests_and_another_does_not_are_the_same() -> None:
    """SpecForge has DSpark's heads in `dflash_config`; a server would not find them there."""
    flat = PUBLISHED["deepspec"]
    heads = [name for name in flat if name.startswith(("markov", "enable_conf", "confidence"))]
    nested = {name: value for name, value in flat.items() if name not in heads}
    nested |= {"architectures": ["DSparkDraftModel"], "dflash_config": {name: flat[name] for name in heads}}
    assert describe(nested, "c").options == describe(flat, "c").options
    with pytest.raises(UserError, match="markov_rank differs from that in dflash_config"):
        describe({**nested, "markov_rank": 9}, "c")


def test_names_of_other_projects_are_the_same_tensors(tmp_path: Path) -> None:
    """`midlayer`, the table of members, and an identity of a whole vocabulary."""
    source = published("eagle", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    renamed["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill(0, torch.arange(100) * 3, True)
    save_file(renamed, source / "model.safetensors")
    convert(source, tmp_path / "native", "native", Given("t", k=2))
    found = load_file(tmp_path / "native/model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    save_file({**renamed, "layers.0.hidden_norm.weight": tensors["norm.weight"].clone()},
              source / "model.safetensors")
    with pytest.raises(UserError, match="another name of the same tensor"):
        convert(source, tmp_path / "twice", "native", Given("t", k=2))


@pytest.mark.parametrize(("name", "changes", "text"), [
    ("eagle", {"rope_theta": None}, "rope_theta is missing, and engines would guess it"),
    ("eagle", {"eagle_aux_hidden_state_layer_ids": [18, 2, 33]}, "must ascend"),
    ("eagle", {"norm_beforeresidual": True}, "'norm_beforeresidual' is not a key .*nearest: norm_before_res"),
    ("eagle", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling|rope_parameters"),
    ("eagle", {"quantization_config": {}}, "'quantization_config' is not a key that is known here"),
    ("eagle", {"attention_bias": True}, "attention_bias is true, a feature that is not supported here"),
    ("modelopt", {"eagle_aux_hidden_state_layer_ids": [3, 18, 33]}, "the layers differ"),
    ("zlab", {"layer_types": ["sliding_attention"]}, "other kinds are not supported here"),
    ("zlab", {"is_causal": True}, "its layers are causal"),
    ("zlab", {"is_neox_style": False}, "is_neox_style is false, a feature that is not supported"),
    ("zlab", {"block_size": 1}, "block_size must be int of at least 2"),
    ("zlab", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1]}}, "'mrope_section'"),
    ("zlab", {"head_dim": None}, "head_dim must be int"),
    ("deepspec", {"markov_head_type": "gated"}, 'markov_head_type is "gated", a feature'),
    ("deepspec", {"mask_token_id": 320}, "mask_token_id 320 is no row of the 320"),
    ("deepspec", {"markov_rank": 9}, "markov_head.markov_w1.weight: expected .320, 9., found .320, 8."),
    ("zlab", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1], "use_swa": True}}, "use_swa"),
    ("zlab", {"architectures": ["DominoDraftModel"]}, "architectures is .*expected one of DFlashDraftModel"),
    ("speculators", {"model_type": "llama"}, "architectures is .*Eagle3DraftModel")])
def test_what_is_not_understood_is_one_sentence(name: str, changes: dict[str, Any], text: str,
                                                tmp_path: Path) -> None:
    source = published(name, tmp_path / "source", **changes)
    with pytest.raises(UserError, match=text) as caught:
        convert(source, tmp_path / "place", "native", Given("t", k=2))
    assert str(source) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "place").exists() and not (tmp_path / "place.partial").exists()


def test_keys_that_a_file_lacks_can_be_given(tmp_path: Path) -> None:
    source = published("eagle", tmp_path / "source", rope_theta=None)
    keys = dict(map(parsed, ["rope_theta=500000.0", "eagle_config.use_aux_hidden_state=true"]))
    convert(source, tmp_path / "place", "native", Given("t", k=2, keys=keys))
    assert LAYOUTS["native"].whole(tmp_path / "place")[0].geometry["rope_parameters"]["rope_theta"] == 5e5
    for text in ("rope_theta", "=3", "a={"):
        with pytest.raises(UserError, match="write --set KEY=VALUE"):
            parsed(text)
    with pytest.raises(UserError, match="--set hidden_size.x: hidden_size is no object"):
        convert(source, tmp_path / "other", "native", Given("t", keys={"hidden_size.x": 1}))


def test_what_the_folder_does_not_say_has_to_be_given(tiny_target: Target, tmp_path: Path) -> None:
    source, zlab = published("eagle", tmp_path / "source"), published("zlab", tmp_path / "zlab")
    for folder, form, given, text in [
            (source, "native", Given(k=2), "does not say which target it is for; give --target"),
            (source, "native", Given("t"), "does not say how many tokens it drafts; give --k"),
            (zlab, "native", Given("t", k=16), "drafts 15 tokens at most .* but the length is 16"),
            (zlab, "native", Given("t", target_layers=30), "after layer 34, and the target has 30 layers"),
            (zlab, "native", Given("t", tiny_target.folder), "after layer 34, and the target has 3 layers"),
            (zlab, "deepspec", Given("t"), "cannot hold this drafter: it has DSpark and EAGLE-3, not dflash"),
            (published("deepspec", tmp_path / "d"), "deepspec", Given("t"), "needs the folder of the")]:
        with pytest.raises(UserError, match=text):
            convert(folder, tmp_path / "place", form, given)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken is there already"):
        convert(source, tmp_path / "taken", "native", Given("t", k=2))
    with pytest.raises(UserError, match="lies inside .*source, which is only read"):
        convert(source, source / "inside", "native", Given("t", k=2))


def test_an_own_embedding_stays_unless_it_is_the_target_s(tiny_target: Target, tmp_path: Path) -> None:
    source = written(tiny_target, "dspark", "deepspec", tmp_path / "deepspec")
    kept = convert(source, tmp_path / "kept", "native", Given("t", k=3))
    assert "embed_tokens.weight" in load_file(tmp_path / "kept/model.safetensors") and kept
    convert(source, tmp_path / "without", "native", Given("t", tiny_target.folder, k=3))
    assert "embed_tokens.weight" not in load_file(tmp_path / "without/model.safetensors")
    with pytest.raises(UserError, match="own embed_tokens.weight, which engines of the format sglang would"):
        convert(source, tmp_path / "place", "sglang", Given("t", k=3))
    tensors = load_file(source / "model.safetensors")
    tensors["embed_tokens.weight"] += 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match="own embed_tokens.weight"):
        convert(source, tmp_path / "place", "sglang", Given("t", tiny_target.folder, k=3))


def test_a_longer_context_writes_both_lengths(tmp_path: Path) -> None:
    source = published("eagle", tmp_path / "source")
    convert(source, tmp_path / "place", "sglang", Given("t", k=2, max_context=8192))
    config = json.loads((tmp_path / "place/config.json").read_text())
    assert config["max_position_embeddings"] == 8192 and config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert config["rope_parameters"] == {**config["rope_scaling"], "rope_theta": 500000.0}
    for length, text in ((2048, "--max-context=2048 must be more than the 2048 positions"),
                         (100, "--max-context=100 must be more")):
        with pytest.raises(UserError, match=text):
            convert(source, tmp_path / "other", "native", Given("t", k=2, max_context=length))


def test_files_that_are_no_drafter_s_are_one_sentence(tmp_path: Path) -> None:
    source = published("eagle", tmp_path / "source")
    good, files = (source / "config.json").read_text(), source / "model.safetensors"
    deep = "[" * 100_000
    twice = good[:-1] + ', "hidden_size": 64}'
    for text in ("", "{", "[]", "null", "3", "NaN", deep, '"x"', twice, good[:-1], "\ud800"):
        (source / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(UserError, match="config.json (cannot be read|must be a JSON object)"):
            convert(source, tmp_path / "place", "native", Given("t", k=2))
    (source / "config.json").write_text(good)
    for place in ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", ".safetensors/..",
                  "a\\b.safetensors", 3, None, [], {}):
        (source / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": place}}))
        with pytest.raises(UserError):
            convert(source, tmp_path / "place", "native", Given("t", k=2))
    (source / INDEX).unlink()
    shutil.copyfile(files, source / "second.safetensors")
    with pytest.raises(UserError, match="another file there has, too"):
        convert(source, tmp_path / "place", "native", Given("t", k=2))
    (source / "second.safetensors").unlink()
    files.write_bytes(files.read_bytes()[:-10])
    with pytest.raises(UserError, match="cannot be read"):
        convert(source, tmp_path / "place", "native", Given("t", k=2))
    (source / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="may run code"):
        convert(source, tmp_path / "place", "native", Given("t", k=2))
    assert [*tmp_path.glob("place*")] == []


def test_a_wide_target_s_drafter_brings_embedding_and_head() -> None:
    found = describe({**PUBLISHED["zlab"], "target_hidden_size": 128}, "c")
    assert {"embed_tokens.weight", "lm_head.weight"} <= promised(found).keys()
    assert promised(found)["fc.weight"] == (64, 3 * 128)
    with pytest.raises(UserError, match="embed_tokens.weight: expected .320, 64., found none"):
        require_tensors(found, {}, "folder")
