"""Every way of conf/hidden_states gives the same tensors, bit for bit; a new YAML is tested at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_class
from tiny import engine, random_samples, states_of, write_responses

from trainer.errors import GateFailed, UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.extract import Probe
from trainer.hidden_states.shards import shard_path
from trainer.records import HiddenStates
from trainer.target import Target

CONF = Path(__file__).parents[2] / "conf/hidden_states"
WAYS = sorted(path.stem for path in CONF.glob("*.yaml"))
SAMPLES = random_samples((40, 23, 57, 31, 12))


def make(name: str, target: Target, tap_layers: list[int], **changes: Any) -> Probe:
    """The stage of conf/hidden_states/NAME.yaml on the tiny target."""
    known = {"${target}": target, "${target_engine}": engine(), "${target.tap_layers}": tap_layers,
             "${target_engine.dtype}": "float32", "${hardware.device}": "cpu"}

    def build(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("${"):
            return known[value]
        if isinstance(value, dict):
            value = {key: build(inner) for key, inner in value.items()}
            if "_target_" in value:
                kind, waits = get_class(value.pop("_target_")), value.pop("_partial_", False)
                return partial(kind, **value) if waits else kind(**value)
        return value

    return build(yaml.safe_load((CONF / f"{name}.yaml").read_text()) | changes)


def extract(stage: Probe, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return stage.run({"responses": write_responses(folder.parent / "responses", SAMPLES, heldout=2)}, folder)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tap_layers", [[1, 2], [3, 0]])
def test_every_source_gives_the_target_s_states_bit_for_bit(name: str, tap_layers: list[int],
                                                            tiny_target: Target,
                                                            tmp_path: Path) -> None:
    stage = make(name, tiny_target, tap_layers)
    record = extract(stage, tmp_path / "states")
    assert all(gate["passed"] for gate in record["gates"].values()) and len(record["gates"]) == 4
    assert record["samples"] == 5 and record["tokens"] == sum(len(sample.tokens) for sample in SAMPLES)
    source = stage.source(folder=tmp_path / "states")
    expected = states_of(tiny_target, SAMPLES, sorted(tap_layers))
    for number in (4, 0, 2, 3, 1, 4):
        found = source.get(SAMPLES[number])
        assert torch.equal(found.taps, expected[number].taps) and found.taps.dtype == torch.float32
        assert torch.equal(found.last, expected[number].last)
    source.close()


@pytest.mark.parametrize("name", WAYS)
def test_the_manifest_says_by_name_what_was_taken(name: str, tiny_target: Target, tmp_path: Path) -> None:
    extract(make(name, tiny_target, [2, 1]), tmp_path / "states")
    manifest = Manifest.read(tmp_path / "states")
    assert manifest.tap_layers == [1, 2] and manifest.dtype == "float32"
    assert manifest.target == tiny_target.identity and manifest.template == tiny_target.template_hash
    assert manifest.tokens == sum(len(sample.tokens) for sample in SAMPLES)
    manifest.require((1, 2))
    with pytest.raises(UserError, match=r"the drafter reads layers \[0, 2\] .* hold layers \[1, 2\]"):
        manifest.require((0, 2))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("layers", [[1, 4], [-1, 2], []])
def test_layers_that_the_target_does_not_have_are_refused(name: str, layers: list[int], tiny_target: Target,
                                                          tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tap_layers \[.*\] must lie between 0 \(embeddings\) and 3"):
        extract(make(name, tiny_target, layers), tmp_path / "states")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_rows_that_the_engine_did_not_compute_stop_the_run(name: str, wrong: float, tiny_target: Target,
                                                           tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of one token of the first sample; an engine that leaves rows out is not to be had, so it is
    put in behind the real one."""
    stage = make(name, tiny_target, [1, 2])
    real = stage.engine.hidden_states

    def holed(rows: Any, layers: Any) -> Any:
        for row, state in zip(rows, real(rows, layers), strict=True):
            taps = state.taps.clone()
            if tuple(row) == SAMPLES[0].tokens:
                taps[5, 64:] = wrong
            yield HiddenStates(taps, state.last)

    monkeypatch.setattr(stage.engine, "hidden_states", holed)
    with pytest.raises(UserError,
                       match="1 rows of hidden states are all zero|gate bad_rows failed: 1") as caught:
        extract(stage, tmp_path / "states")
    assert isinstance(caught.value, GateFailed) == (name == "online")
    assert not list((tmp_path / "states").glob("shard-*.safetensors")), "nothing bad is kept"


def test_an_extraction_goes_on_with_the_missing_shards(tiny_target: Target, tmp_path: Path) -> None:
    stage = make("offline", tiny_target, [1, 2], shard_tokens=60)
    record = extract(stage, tmp_path / "states")
    before = {path.name: path.read_bytes() for path in (tmp_path / "states").iterdir()}
    assert sum(name.startswith("shard-") for name in before) == 4
    shard_path(tmp_path / "states", 1).unlink()
    (tmp_path / "states" / "shard-00001.partial").write_bytes(b"torn")
    (tmp_path / "states" / "manifest.json").unlink()
    asked = []
    real = stage.engine.hidden_states
    stage.engine.hidden_states = lambda rows, layers: asked.extend(rows) or real(rows, layers)
    assert extract(stage, tmp_path / "states") == record
    assert {path.name: path.read_bytes() for path in (tmp_path / "states").iterdir()} == before
    assert asked == [SAMPLES[1].tokens], "only the missing shard is asked for"
