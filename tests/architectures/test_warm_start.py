"""Beginning with an exported block drafter: the same backbone to the bit, or one sentence."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import copied, make_small, random_samples, small, states_of, uneven
from torch import Tensor

from trainer._weight_files import INDEX
from trainer.architectures.base import Drafter
from trainer.errors import UserError
from trainer.export.formats import FORMATS, Serving
from trainer.target import Target
from trainer.training.build import build_drafter, first_drafter, require_start, start_facts

COUNTS = torch.arange(320).flip(0)
OLD = {"original_max_position_embeddings": 128}
ROPES = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0},
         {"rope_type": "dynamic", "factor": 2.0},
         {"rope_type": "yarn", "factor": 4.0, **OLD},
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD},
         {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0, **OLD}]


def exported(drafter: Drafter, folder: Path, form: str = "native") -> str:
    FORMATS[form].write(folder, drafter.export(), Serving("t", ["LlamaForCausalLM"], 2), torch.float32)
    return str(folder)


def begun(target: Target, name: str, folder: str, **settings: Any) -> Any:
    return first_drafter(make_small(name, start_from=folder, **settings), target, COUNTS)[0].eval()


@pytest.fixture(scope="module")
def given(tiny_target: Target) -> Any:
    return uneven(small(tiny_target, "dflash")).eval()


@pytest.fixture(scope="module")
def folder(given: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return exported(given, tmp_path_factory.mktemp("given") / "native")


def context_of(drafter: Drafter, target: Target) -> Any:
    [sample] = random_samples((20,))
    [state] = states_of(target, [sample], [1, 2])
    return drafter.extend(drafter.new_context(), sample.tokens, state.taps)


@pytest.mark.parametrize("form", sorted(Drafter.formats))
def test_dspark_begins_as_the_dflash_drafter(tiny_target: Target, given: Any, tmp_path: Path,
                                             form: str) -> None:
    """With a Markov head of zero its logits are those of DFlash: at every slot where slot 0 predicts nothing,
    at all but the anchor's own where it does."""
    start = exported(given, tmp_path / form, form)
    context = context_of(given, tiny_target)
    hidden, expected = given.block(context, 70, 4), given.draft_logits(context, 70, 4)
    assert expected.std() > 0.5
    for from_anchor in (False, True):
        drafter = begun(tiny_target, "dspark", start, sample_from_anchor=from_anchor)
        torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)
        context, slots = context_of(drafter, tiny_target), 4 + from_anchor
        own = drafter.block(context, 70, slots)[-4:]
        assert torch.equal(own, hidden) and torch.equal(drafter.row_logits(own, torch.arange(4)), expected)
        torch.testing.assert_close(drafter.draft_logits(context, 70, slots)[-4:], expected)


def test_every_block_drafter_begins_with_the_backbone(tiny_target: Target, given: Any, folder: str) -> None:
    hidden = given.block(context_of(given, tiny_target), 70, 4)
    again, other = begun(tiny_target, "dflash", folder, seed=9), begun(tiny_target, "dflash2", folder)
    for (name, one), (_, two) in zip(again.named_parameters(), given.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    found = other.block(context_of(other, tiny_target), 70, 4)
    assert torch.equal(found, hidden), "its convolutions begin as the identity"


def test_a_drafter_of_the_same_method_brings_its_convolutions(tiny_target: Target, tmp_path: Path) -> None:
    first = uneven(small(tiny_target, "dflash2"))
    folder = exported(first, tmp_path)
    again = begun(tiny_target, "dflash2", folder)
    assert all(torch.equal(one, two) for one, two in zip(again.layers.parameters(), first.layers.parameters(),
                                                         strict=True))
    assert not torch.equal(again.candidate_selector.predecessor_codebook,
                           first.candidate_selector.predecessor_codebook), "heads begin anew"
    with pytest.raises(UserError, match="8 tensors of its backbone differ.*attention_conv.base_kernel: "
                                        "expected none, found .*; begin with a whole drafter of this method"):
        begun(tiny_target, "dflash", folder)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_what_fits_is_refused_of_no_target(tiny_target: Target, tmp_path: Path, rope: dict[str, Any]) -> None:
    """Whatever its positions are; nothing has values when it is asked."""
    target = copied(tiny_target, tmp_path / "target", config={"rope_parameters": {"rope_theta": 1e4, **rope}})
    folder = exported(small(target, "dflash"), tmp_path / "given")
    for name in ("dflash", "dflash2", "dspark"):
        require_start(make_small(name, start_from=folder), target)


@pytest.mark.parametrize(("settings", "said"), [
    ({"layers": 1}, "its num_hidden_layers is 2, and here it is 1; set drafter.layers to it"),
    ({"tap_layers": [1, 3]}, r"its tap_layers is \[1, 2\], and here it is \[1, 3\]; set drafter.tap_layers"),
    ({"intermediate_size": 96}, "its intermediate_size is 128, and here it is 96; set drafter.inter")])
def test_another_geometry_is_said(tiny_target: Target, folder: str, settings: dict[str, Any],
                                  said: str) -> None:
    with pytest.raises(UserError, match=f"drafter.start_from={folder} cannot be begun with: {said}"):
        require_start(make_small("dspark", start_from=folder, **settings), tiny_target)


def test_a_block_drafter_is_no_start_of_a_chain(tiny_target: Target, folder: str) -> None:
    """Whatever its geometry is: nobody is to be told, key by key, how to make the two alike."""
    said = r"its config.json is not that of EAGLE-3 \(it has a block_size, as block drafters have\)"
    with pytest.raises(UserError, match=f"drafter.start_from={folder} cannot be begun with: {said}"):
        require_start(make_small("eagle3", start_from=folder, layers=2, tap_layers=[1, 2], style="qwen3"),
                      tiny_target)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("hidden_size", 32, "its hidden_size is 32, and here it is 64; it belongs to a target of another shape"),
    ("mask_token_id", 5, "its mask_token_id is 5, and here it is .*; set target.mask_token to it"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6}, "its rope_parameters is"),
    ("layer_types", ["sliding_attention"] * 2, "its layer_types is"),
    ("attention_bias", True, "its attention_bias is True, and here it is False"),
    ("vocab_size", "320", "its vocab_size is '320', and here it is 320"),
    ("is_neox_style", False, "its is_neox_style is False, a feature that no drafter here has; begin without"),
    ("is_causal", True, "its is_causal is True, a feature that no drafter here has"),
    ("rope_parameters", {}, r".*is not that of a block drafter \(its config.json has no rope_theta"),
    ("rms_norm_eps", 10 ** 400, r"its config.json is not that of a block drafter \(int too large"),
    ("num_hidden_layers", None, "its config.json is not that of a block drafter")])
def test_another_target_s_drafter_is_said(tiny_target: Target, given: Any, tmp_path: Path, key: str,
                                          value: Any, said: str) -> None:
    folder = exported(given, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    place = config["dflash_config"] if key == "mask_token_id" else config
    place |= {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"cannot be begun with: {said}"):
        require_start(make_small("dflash", start_from=folder), tiny_target)


def test_a_drafter_written_elsewhere_may_have_more(tiny_target: Target, given: Any, tmp_path: Path) -> None:
    """Embeddings, a head and membership masks are the target's business; a missing or fused part is not."""
    folder = exported(given, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"embed_tokens.weight": torch.zeros(320, 64), "t2d": torch.zeros(320, dtype=torch.bool)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert torch.equal(begun(tiny_target, "dflash", folder).fc.weight, given.fc.weight)
    save_file(tensors | {"gru.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"it has tensors of no method here \(gru.weight\)"):
        begun(tiny_target, "dflash", folder)
    del tensors["layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("dflash", "dflash2", "dspark"):  # before a run as well
        with pytest.raises(UserError, match=r"drafter.start_from=.* cannot be begun with: 1 tensors of its "
                                            r"backbone .* \(layers.1.self_attn.q_proj.weight: expected "):
            require_start(make_small(name, start_from=folder), tiny_target)
    with pytest.raises(UserError, match="1 tensors of its backbone"):
        begun(tiny_target, "dflash", folder)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="model.safetensors cannot be read .* drafter.start_from again"):
        begun(tiny_target, "dflash", folder)


def codes(tensors: dict[str, Tensor]) -> None:
    tensors |= {name: tensor.to(torch.int8) for name, tensor in tensors.items()}


def twice(folder: Path) -> None:
    save_file({"fc.weight": torch.zeros(64, 128)}, folder / "zz.safetensors")


def indexed(folder: Path, name: str, file: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file}}))


SPOILT = {  # its tensors or its folder, and what is told
    "eight bits": (codes, None, r"fc.weight: expected \[64, 128\], found \[64, 128\] of int8"),
    "no numbers": (lambda tensors: tensors["norm.weight"].fill_(torch.nan), None,
                   "norm.weight: expected finite numbers, found others"),
    "a tensor twice": (None, twice, r"zz.safetensors has 1 tensors that another file there has, too \(fc"),
    "a shard lost": (None, partial(indexed, name="fc.weight", file="lost.safetensors"),
                     "lost.safetensors cannot be read .*; export the drafter of drafter.start_from again"),
    "a tensor lost": (None, partial(indexed, name="x", file="model.safetensors"),
                      r"lacks 1 tensors that its model.safetensors.index.json names \(x\)"),
    "an index that leaves the folder": (None, partial(indexed, name="fc.weight",
                                                      file="../given/model.safetensors"),
                                        "lies in '../given/model.safetensors', expected the name of a "),
    "a pickle": (None, lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"),
                 "has pytorch_model.bin, which may run code when they are opened; only safetensors is read"),
    "an index of nothing": (None, lambda folder: (folder / INDEX).write_text('{"weight_map": []}'),
                            "index.json is not an index of shards ")}


@pytest.mark.parametrize("case", SPOILT)
def test_weights_that_mean_something_else_are_told(tiny_target: Target, folder: str, tmp_path: Path,
                                                   case: str) -> None:
    """Before a run, and of every drafter that reads such a folder by the same reader."""
    weights, files, said = SPOILT[case]
    given = Path(shutil.copytree(folder, tmp_path / "given"))
    if weights is not None:
        tensors = load_file(given / "model.safetensors")
        weights(tensors)
        save_file(tensors, given / "model.safetensors")
    if files is not None:
        files(given)
    with pytest.raises(UserError, match=said):
        require_start(make_small("dspark", start_from=str(given)), tiny_target)


def test_files_that_the_index_does_not_name_are_not_read(tiny_target: Target, given: Any,
                                                         tmp_path: Path) -> None:
    folder = exported(given, tmp_path)
    twice(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert torch.equal(begun(tiny_target, "dflash", folder).fc.weight, given.fc.weight)
    assert INDEX in start_facts(make_small("dflash", start_from=folder))["start_from"]


def test_its_weights_are_part_of_the_fingerprint(tiny_target: Target, given: Any, tmp_path: Path) -> None:
    make = make_small("dspark", start_from=exported(given, tmp_path))
    facts = start_facts(make)
    assert set(facts["start_from"]) == {"config.json", "model.safetensors"} and json.dumps(facts)
    (tmp_path / "README.md").write_text("notes")
    assert start_facts(make) == facts
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert start_facts(make) != facts
    assert start_facts(make_small("dspark")) == {} == start_facts(make_small("eagle3"))


def test_a_folder_that_is_none_is_said(tiny_target: Target, tmp_path: Path) -> None:
    make = make_small("dflash", start_from=str(tmp_path))
    said = set()
    for use in (start_facts, partial(require_start, target=tiny_target)):
        with pytest.raises(UserError, match=f"={tmp_path} is no folder of an exported drafter") as raised:
            use(make)
        said.add(str(raised.value))
        assert not use(make_small("dflash"))
    assert len(said) == 1, "one mistake, one sentence, whoever finds it first"


@pytest.mark.parametrize(("config", "weights", "said"), [
    ("{", b"", "config.json cannot be read .*; export the drafter of drafter.start_from again"),
    ("[]", b"", "config.json must be a JSON object, but holds a list; export the drafter of"),
    ("[" * 100_000, b"", "config.json cannot be read"),
    ('{"num_attention_heads": 0, "num_hidden_layers": 1, "hidden_size": 8, "rms_norm_eps": 1, '
     '"rope_theta": 1, "intermediate_size": 8, "max_position_embeddings": 8, "target_layer_ids": []}', b"",
     r"its config.json is not that of a block drafter \(integer .*modulo by zero"),
    ('{"transformer_layer_config": []}', b"", "its config.json is not that of a block drafter"),
    ("{}", b"", r"its config.json is not that of a block drafter \(it has no target_layer_ids\)"),
    (None, b"torn", "model.safetensors cannot be read .*; export the drafter of drafter.start_from again")])
def test_a_folder_that_is_spoilt_is_said_before_a_run(tiny_target: Target, folder: str, tmp_path: Path,
                                                      config: str | None, weights: bytes, said: str) -> None:
    (tmp_path / "config.json").write_text(config or (Path(folder) / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=said):
        require_start(make_small("dflash", start_from=str(tmp_path)), tiny_target)


def test_what_was_trained_needs_the_folder_no_more(tiny_target: Target) -> None:
    """Export builds the drafter for the trained weights, which replace all that it began with."""
    assert build_drafter(make_small("dspark", start_from="/no/folder"), tiny_target, COUNTS).max_k == 5


CHAIN: dict[str, Any] = {"layers": 1, "tap_layers": [1, 2, 3]}


@pytest.mark.parametrize("form", ["speculators", "native", "sglang"])
def test_eagle3_begins_as_the_one_in_the_folder(tiny_target: Target, tmp_path: Path, form: str) -> None:
    first = uneven(small(tiny_target, "eagle3", COUNTS, **CHAIN)).eval()
    serving = Serving("t", ["LlamaForCausalLM"], 2, tiny_target.folder, 3)
    FORMATS[form].write(tmp_path, first.export(), serving, torch.float32)
    again = begun(tiny_target, "eagle3", str(tmp_path), seed=9, **CHAIN)
    for (name, one), (_, two) in zip(again.named_parameters(), first.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    require_start(make_small("eagle3", start_from=str(tmp_path), **CHAIN), tiny_target)


@pytest.mark.parametrize(("settings", "said"), [
    ({"layers": 2}, "its num_hidden_layers is 1, and here it is 2; set drafter.layers to it"),
    ({"tap_layers": [1, 2]}, r"its tap_layers is \[1, 2, 3\], and here it is \[1, 2\]"),
    ({"style": "qwen3"}, "its model_type is 'llama', and here it is 'qwen3'; set drafter.style to it"),
    ({"norm_output": True}, "its norm_output is False, and here it is True; set drafter.norm_output to it")])
def test_another_eagle3_is_said(tiny_target: Target, tmp_path: Path, settings: dict[str, Any],
                                said: str) -> None:
    folder = exported(small(tiny_target, "eagle3", **CHAIN), tmp_path)
    make = make_small("eagle3", start_from=folder, **{**CHAIN, **settings})
    with pytest.raises(UserError, match=f"drafter.start_from={folder} cannot be begun with: {said}"):
        require_start(make, tiny_target)


def test_what_is_no_whole_eagle3_is_said(tiny_target: Target, tmp_path: Path) -> None:
    place = exported(small(tiny_target, "eagle3", **CHAIN), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"1 of its tensors differ from those here \(fc.weight: expected "):
        require_start(make_small("eagle3", start_from=place, **CHAIN), tiny_target)
