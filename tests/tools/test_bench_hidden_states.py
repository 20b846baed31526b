"""`tools/bench_hidden_states.py`: that it measures what it says, on small caches; its figures are for
people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import manifest_of, random_samples, states_of

from trainer.hidden_states.writer import ShardWriter
from trainer.target import Target

TOOL = Path(__file__).parents[2] / "tools/bench_hidden_states.py"


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True,
                          check=False, cwd="/", env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("storage", ["native", "float8_e4m3fn"])
def test_reading_is_measured_against_a_copy_of_the_same_bytes(tmp_path: Path, storage: str) -> None:
    done = call("read", "--samples", "6", "--tokens", "20", "--hidden", "32", "--layers", "2", "--rounds",
                "3", "--storage", storage, "--dir", tmp_path, "--json", tmp_path / "out.json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the cache is gone again"
    assert (found["samples"], found["layers"], found["hidden_size"]) == (6, 2, 32)
    row = 64 if storage == "native" else 34
    assert 2 * found["tokens"] * row < found["bytes"] < 3 * found["tokens"] * row
    assert list(found["arms"]) == ["copy", "never", "first"]
    assert found["arms"]["copy"]["of_copy"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    for arm in found["arms"].values():
        for figures in arm.values():
            assert 0 < figures["least"] <= figures["median"] <= figures["most"]
    assert found["machine"]["command"][:2] == ["bench_hidden_states.py", "read"]
    for text in ("6 samples", "GB/s", "of the copy", "never", "first"):
        assert text in done.stdout


def test_an_existing_cache_is_read_and_left_alone(tmp_path: Path, tiny_target: Target) -> None:
    samples = random_samples((40, 23, 57))
    with ShardWriter(tmp_path, manifest_of(tiny_target, [1, 3]), 20_000) as writer:
        for sample, states in zip(samples, states_of(tiny_target, samples, [1, 3]), strict=True):
            writer.append(sample, states)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = call("read", "--cache", tmp_path, "--rounds", "1")
    assert done.returncode == 0 and "3 samples" in done.stdout and "2 layers of 64" in done.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_measured_is_said(tmp_path: Path, tiny_target: Target) -> None:
    done = call("read", "--cache", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path}/manifest.json is missing")
    manifest_of(tiny_target, [1]).write(tmp_path)
    done = call("read", "--cache", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} holds no sample to read; expected a cache with some\n"
    assert call().returncode == 2 and "COMMAND" in call("--help").stdout
