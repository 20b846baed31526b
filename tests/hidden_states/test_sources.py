"""Every way of conf/hidden_states gives the same tensors, bit for bit; a new YAML is tested at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_states import CONF, SAMPLES, SMALL_SHARD, contents, equal, extract, make
from tiny import copied, states_of

from trainer.errors import GateFailed, UserError
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.extract import Probe
from trainer.hidden_states.index import index_path
from trainer.records import HiddenStates, KeysValues, LastState
from trainer.target import Target

WAYS = sorted(path.stem for path in CONF.glob("*.yaml"))
STORAGES = ["native", "float8_e4m3fn"]


def source_of(stage: Probe, folder: Path, layers: list[int]) -> HiddenStateSource:
    return stage.source(folder=folder, layers=layers)


def expected_states(target: Target, stage: Probe, layers: list[int]) -> list[HiddenStates]:
    """What the engine gives, through the storage of the stage."""
    codec = Codec(stage.storage, torch.float32, tuple(layers), 64, stage.last_rows)
    return [codec.roundtrip(state, sample.loss_mask)
            for sample, state in zip(SAMPLES, states_of(target, SAMPLES, layers), strict=True)]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tap_layers", [[1, 2], [3, 0]])
@pytest.mark.parametrize(("storage", "last_rows"), [(STORAGES[0], "supervised"), (STORAGES[0], "all"),
                                                    (STORAGES[1], "supervised"), (STORAGES[1], "none")])
def test_every_source_gives_the_target_s_states_bit_for_bit(name: str, tap_layers: list[int],
                                                            tiny_target: Target, tmp_path: Path, storage: str,
                                                            last_rows: str) -> None:
    stage = make(name, tiny_target, tap_layers, storage=storage, last_rows=last_rows)
    record = extract(stage, tmp_path / "states")
    assert all(gate["passed"] for gate in record["gates"].values())
    assert len(record["gates"]) == 4 - (last_rows == "none")
    assert record["samples"] == 5 and record["tokens"] == sum(len(sample.tokens) for sample in SAMPLES)
    source = source_of(stage, tmp_path / "states", tap_layers)
    expected = expected_states(tiny_target, stage, sorted(tap_layers))
    for number in (4, 0, 2, 3, 1, 4):
        assert equal(source.get(SAMPLES[number]), expected[number])
    assert any(bool(state.last.any()) for state in expected) == (last_rows != "none")
    source.close()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("storage", STORAGES)
def test_some_of_the_layers_are_given_as_if_they_were_all(name: str, tiny_target: Target, tmp_path: Path,
                                                          storage: str) -> None:
    stage = make(name, tiny_target, [0, 1, 2, 3], storage=storage)
    extract(stage, tmp_path / "states")
    for layers in ([2], [0, 3], [1, 2, 3]):
        source = source_of(stage, tmp_path / "states", layers)
        for sample, expected in zip(SAMPLES, expected_states(tiny_target, stage, layers), strict=True):
            assert equal(source.get(sample), expected)
        source.close()
    with pytest.raises(UserError, match=r"reads layers \[1, 5\] .* hold layers \[0, 1, 2, 3\] .*\[5\] are "
                                        "mi"):
        source_of(stage, tmp_path / "states", [5, 1])


@pytest.mark.parametrize("name", ["online", "in_process"])
@pytest.mark.parametrize("storage", STORAGES)
def test_taps_that_no_folder_holds_lie_behind_the_layers(name: str, storage: str, tiny_target: Target,
                                                         tmp_path: Path) -> None:
    """They go through no storage; what a layer's states go through is not theirs."""
    stage = make(name, tiny_target, [1, 2], storage=storage)
    extract(stage, tmp_path / "states")
    taps = [2, LastState(), KeysValues("full_attention")]
    source = stage.source(folder=tmp_path / "states", layers=taps)
    for sample, layer, every in zip(SAMPLES, expected_states(tiny_target, stage, [2]),
                                    states_of(tiny_target, SAMPLES, taps), strict=True):
        found = source.get(sample)
        assert torch.equal(found.last, layer.last) and torch.equal(found.taps[:, :64], layer.taps)
        assert torch.equal(found.taps[:, 64:], every.taps[:, 64:]) and found.taps.shape[1] == 64 * 2 + 2 * 32
    source.close()


@pytest.mark.parametrize("name", WAYS)
def test_threads_may_ask_one_source(name: str, tiny_target: Target, tmp_path: Path) -> None:
    stage = make(name, tiny_target, [1, 2])
    extract(stage, tmp_path / "states")
    source = source_of(stage, tmp_path / "states", [1, 2])
    expected = expected_states(tiny_target, stage, [1, 2])
    wrong: list[str] = []

    def ask(start: int) -> None:
        for turn in range(25):
            number = (start + turn) % len(SAMPLES)
            if not equal(source.get(SAMPLES[number]), expected[number]):
                wrong.append(SAMPLES[number].id)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    source.close()


@pytest.mark.parametrize("name", WAYS)
def test_a_source_of_another_target_is_refused(name: str, tiny_target: Target, tmp_path: Path) -> None:
    """Training compares the manifest as well, for sources that know no target."""
    extract(make(name, tiny_target, [1, 2]), tmp_path / "states")
    other = copied(tiny_target, tmp_path / "other",
                   lambda tensors: [each.add_(1) for each in tensors.values()])
    stage = make(name, other, [1, 2])
    with pytest.raises(UserError, match=f"another target: expected {other.identity}, "
                                        f"found {tiny_target.identity}; remove"):
        extract(stage, tmp_path / "states")
    if name != "offline":
        with pytest.raises(UserError, match="of another target: expected"):
            source_of(stage, tmp_path / "states", [1, 2])


@pytest.mark.parametrize("name", WAYS)
def test_the_manifest_says_by_name_what_was_taken(name: str, tiny_target: Target, tmp_path: Path) -> None:
    extract(make(name, tiny_target, [2, 1]), tmp_path / "states")
    manifest = Manifest.read(tmp_path / "states")
    assert manifest.tap_layers == [1, 2] and manifest.dtype == "float32"
    assert manifest.target == tiny_target.identity and manifest.template == tiny_target.template_hash
    assert (manifest.storage, manifest.last_rows, manifest.hidden_size) == ("native", "supervised", 64)
    assert manifest.engine.startswith("transformers 5.")


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
    assert isinstance(caught.value, GateFailed) == (name != "offline")
    assert not list((tmp_path / "states").glob("shard-*")), "nothing bad is kept"


@pytest.mark.parametrize("name", WAYS)
def test_states_of_too_few_tokens_stop_the_run(name: str, tiny_target: Target, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server gives them that takes the beginning of a prompt from a cache."""
    stage = make(name, tiny_target, [1, 2])
    real = stage.engine.hidden_states
    monkeypatch.setattr(stage.engine, "hidden_states", lambda rows, layers: (
        HiddenStates(state.taps[4:], state.last[4:]) for state in real(rows, layers)))
    with pytest.raises(UserError, match=r"returned taps \[36, 128\] .* sample s0, expected \[40, 128\]"):
        extract(stage, tmp_path / "states")


def test_an_extraction_goes_on_behind_the_last_commit(tiny_target: Target, tmp_path: Path) -> None:
    stage = make("offline", tiny_target, [1, 2],
                 runtime={"shard_gib": SMALL_SHARD, "commit_tokens": 1})
    record = extract(stage, tmp_path / "states")
    before = contents(tmp_path / "states")
    assert sum(name.startswith("shard-") for name in before) == 4
    width = len(before["index.bin"]) // 5
    index_path(tmp_path / "states").write_bytes(before["index.bin"][:3 * width + 7])
    asked = watch(stage)
    assert extract(stage, tmp_path / "states") == record
    assert contents(tmp_path / "states") == before
    assert asked == [sample.tokens for sample in SAMPLES[3:]], "only what was not committed is asked for"
    asked.clear()
    assert extract(stage, tmp_path / "states") == record and not asked


def watch(stage: Probe) -> list[Any]:
    """The rows that the stage asks its engine for from now on."""
    asked: list[Any] = []
    real: Callable[..., Any] = stage.engine.hidden_states
    stage.engine.hidden_states = lambda rows, layers: asked.extend(rows) or real(rows, layers)
    return asked


def test_samples_may_be_stored_in_any_order(tiny_target: Target, tmp_path: Path) -> None:
    """Samples that came first before, or not at all: what is stored stays, the rest is added."""
    stage = make("offline", tiny_target, [1, 2], runtime={"commit_tokens": 30})
    extract(stage, tmp_path / "states", SAMPLES[::-1][:3])
    asked = watch(stage)
    extract(stage, tmp_path / "states", [SAMPLES[1], SAMPLES[4], SAMPLES[0], SAMPLES[2], SAMPLES[3]])
    assert sorted(asked) == sorted(sample.tokens for sample in SAMPLES[:2])
    source = source_of(stage, tmp_path / "states", [1, 2])
    for sample, expected in zip(SAMPLES, expected_states(tiny_target, stage, [1, 2]), strict=True):
        assert equal(source.get(sample), expected)


def test_a_folder_of_other_settings_is_not_added_to(tiny_target: Target, tmp_path: Path) -> None:
    extract(make("offline", tiny_target, [1, 2]), tmp_path / "states")
    for changes, said in (({"storage": "float8_e4m3fn"}, "another storage: expected float8_e4m3fn, found "
                                                         "native"),
                          ({"last_rows": "all"}, "rows of the last state: expected all, found supervised"),
                          ({"dtype": "bfloat16"}, "another dtype: expected bfloat16, found float32")):
        with pytest.raises(UserError, match=f"{Manifest.path(tmp_path / 'states')} .*{said}; remove"):
            extract(make("offline", tiny_target, [1, 2], **changes), tmp_path / "states")
    with pytest.raises(UserError, match=r"choice of layers: expected \[0, 1\], found \[1, 2\]"):
        extract(make("offline", tiny_target, [0, 1]), tmp_path / "states")
