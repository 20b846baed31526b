"""`tools/bench_hidden_states.py`: that it measures what it says, on small caches; its figures are for
people."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import manifest_of, random_samples, states_of

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import peer

from trainer.hidden_states.writer import ShardWriter
from trainer.progress import exit_status
from trainer.target import Target

TOOL = Path(__file__).parents[2] / "tools/bench_hidden_states.py"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The tool in this process: status, output, errors."""
    main = runpy.run_path(str(TOOL))["main"]

    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
        capsys.readouterr()
        try:
            status = exit_status(main, goes_on=True)
        except SystemExit as left:  # of argparse
            status = int(left.code or 0)
        return status, *capsys.readouterr()

    return called


SMALL = ("read", "--samples", "6", "--tokens", "20", "--hidden", "32", "--layers", "2", "--rounds", "2")


@pytest.mark.parametrize("storage", ["native", "both"])
def test_reading_is_measured_against_a_copy_of_the_same_bytes(call: Call, tmp_path: Path,
                                                              storage: str) -> None:
    status, out, err = call(*SMALL, "--storage", storage, "--dir", tmp_path, "--json", tmp_path / "out.json")
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the cache is gone again"
    assert (found["samples"], found["layers"], found["hidden_size"]) == (6, 2, 32)
    rows = {"native": 64, "float8_e4m3fn": 34} if storage == "both" else {"native": 64}
    assert found["bytes"].keys() == rows.keys()
    for name, row in rows.items():
        assert 2 * found["tokens"] * row < found["bytes"][name] < 3 * found["tokens"] * row
        assert found["arms"][f"{name}: copy"]["of_copy"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert list(found["arms"]) == [f"{name}: {arm}" for name in rows for arm in ("copy", "never", "first")]
    check_figures(found)
    assert [each["arm"] for each in found["goals"]] == [f"{name}: never" for name in rows]
    for text in ("6 samples", "GB/s", "of a native copy", "never", "first", "0.7 or more was wanted"):
        assert text in out


def check_figures(found: dict[str, Any]) -> None:
    for arm in found["arms"].values():
        for figures in arm.values():
            assert 0 < figures["least"] <= figures["median"] <= figures["most"]
    for goal in found["goals"]:
        assert goal["found"] == found["arms"][goal["arm"]][goal["ratio"]]["median"]
        assert goal["met"] == (goal["found"] >= goal["least"])
    assert found["machine"]["command"][:2] == ["bench_hidden_states.py", found["what"]]


def test_a_missed_goal_is_a_failure_only_when_asked_for(call: Call, tmp_path: Path) -> None:
    """So small samples that what is done around the copy is most of the work."""
    tiny = (*SMALL[:-1], "1", "--dir", tmp_path)
    assert call(*tiny)[0] == 0
    status, out, _ = call(*tiny, "--assert")
    assert status == 1 and "goal missed: native: never" in out


def test_extraction_is_measured_against_prefill_on_the_same_server(
        call: Call, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is one that answers at once; the real one is for people with minutes."""
    for name, value in (("HIDDEN", 64), ("VOCABULARY", 320)):
        monkeypatch.setattr(peer, name, value)
    with peer.Peer(tmp_path, max_model_len=513) as server:
        server.act = lambda number, body: time.sleep(0.01)
        status, _, err = call(
            "extract", "--samples", "6", "--tokens", "20", "--rounds", "2", "--dir", tmp_path, "--json",
            tmp_path / "out.json", "target=folder", "target.name=tiny", "target.tap_layers=[1,2]",
            f"target.source.path={tiny_target.folder}", "target.mask_token='<|mask|>'",
            "target.max_length=512", "target_engine.dtype=float32",
            f"target_engine.runtime.state_urls=[{server.url}]",
            f"target_engine.runtime.shared_folder={tmp_path}")
        asked = [bool(body.get("kv_transfer_params")) for body in server.seen]
    assert status == 0, err
    found = json.loads((tmp_path / "out.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"connector", "out.json"}, "no caches, no files"
    assert list(found["arms"]) == ["plain", "states", "stored"] and found["tokens"] > 60
    assert found["arms"]["plain"]["of_plain"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    check_figures(found)
    assert len(asked) == 2 + 3 * 3 * 6 and sum(asked) == 2 + 2 * 3 * 6, "a probe, a start, three rounds"
    assert [(each["arm"], each["ratio"], each["least"]) for each in found["goals"]] == \
        [("stored", "of_plain", 0.9)]


def test_an_existing_cache_is_read_and_left_alone(call: Call, tmp_path: Path, tiny_target: Target) -> None:
    samples = random_samples((40, 23, 57))
    with ShardWriter(tmp_path, manifest_of(tiny_target, [1, 3]), 20_000) as writer:
        for sample, states in zip(samples, states_of(tiny_target, samples, [1, 3]), strict=True):
            writer.append(sample, states)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, _ = call("read", "--cache", tmp_path, "--rounds", "1")
    assert status == 0 and "3 samples" in out and "2 layers of 64" in out
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_measured_is_said(call: Call, tmp_path: Path, tiny_target: Target) -> None:
    status, _, err = call("read", "--cache", tmp_path)
    assert status == 2 and err.startswith(f"error: {tmp_path}/manifest.json is missing")
    manifest_of(tiny_target, [1]).write(tmp_path)
    status, _, err = call("read", "--cache", tmp_path)
    assert status == 2 and err == f"error: {tmp_path} holds no sample to read; expected a cache with some\n"
    status, _, err = call("extract", "target_engine.typo=1")
    assert status == 2 and err.startswith("error: target_engine.typo")
    assert call()[0] == 2 and "COMMAND" in call("--help")[1]
