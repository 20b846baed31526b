"""The plan before the bytes: exact where the answers are there, an upper bound where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stored_states import SAMPLES, extract, make
from tiny import random_samples, regenerate

from trainer.data.own_prompts import OwnPrompts
from trainer.data.prompts import Jsonl, Prompts
from trainer.data.responses import Length
from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.plan import Plan, needed
from trainer.target import Target


@pytest.fixture
def plan(tiny_target: Target, tmp_path: Path) -> Plan:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in (["a"], ["b", "c"], ["d"])))
    return Plan(Prompts(Jsonl(str(source)), None, 1, 0.0, None, None, None),
                regenerate(tiny_target), make("offline", tiny_target, [1, 2]))


NO_OWN = OwnPrompts(0, 64, 1.0, 0.9)


def planned(plan: Plan, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    plan.run(inputs, out)
    return json.loads((out / "plan.json").read_text())


def test_finished_answers_give_exact_sizes(plan: Plan, tiny_target: Target, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    record = extract(make("offline", tiny_target, [1, 2]), tmp_path / "states")
    found = planned(plan, {"responses": tmp_path / "responses"}, tmp_path / "plan")
    assert found["exact"] and found["rows"] == 5 and found["tokens"] == record["tokens"]
    [native] = [need for need in found["needs"] if (need["mode"], need["storage"]) == ("offline", "native")]
    shards = sum(path.stat().st_size for path in (tmp_path / "states").glob("shard-*"))
    assert shards <= native["bytes"] < shards + 4096, "but for the page after the last sample"
    shown = capsys.readouterr().out
    assert "at most" not in shown and all(mode in shown for mode in ("offline", "hybrid", "online"))


def test_before_that_every_answer_is_as_long_as_it_may_be(plan: Plan, tmp_path: Path) -> None:
    found = planned(plan, {}, tmp_path / "plan")
    assert not found["exact"] and found["rows"] == 4
    Prompts(plan.prompts.source, None, 1, 0.0, None, None, None).run({}, tmp_path / "plan")
    assert planned(plan, {"prompts": tmp_path / "plan"}, tmp_path / "again")["tokens"] == found["tokens"]
    (tmp_path / "real").mkdir()
    plan.responses.run({"prompts": tmp_path / "plan"}, tmp_path / "real")
    assert planned(plan, {"responses": tmp_path / "real"}, tmp_path / "exact")["tokens"] <= found["tokens"]


def test_what_fits_is_told_for_every_mode(tiny_target: Target) -> None:
    manifest = Manifest(tiny_target.identity, "t", [1, 2], 64, "float32", "native", "supervised", "tests")
    rows = [Length(f"s{number}", 100, 40) for number in range(10)]
    everything = {(need.mode, need.storage): need for need in needed(rows, manifest, 1 << 40)}
    native, small = everything["offline", "native"], everything["offline", "float8_e4m3fn"]
    assert small.bytes < 0.5 * native.bytes and all(need.share == 1 for need in everything.values())
    tight = {(need.mode, need.storage): need for need in needed(rows, manifest, small.bytes)}
    assert tight["offline", "native"].share == 0 and tight["offline", "float8_e4m3fn"].share == 1
    assert tight["hybrid", "native"].share == pytest.approx(small.bytes / native.bytes)
    assert tight["online", "native"].bytes == 0 and tight["online", "native"].share == 1


def test_a_run_that_cannot_fit_is_refused_before_it_starts(tiny_target: Target, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked from the engine; the message names settings that make it fit."""
    stage = make("offline", tiny_target, [1, 2])
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("trainer.hidden_states.extract.shutil.disk_usage", lambda folder: usage)
    monkeypatch.setattr(stage.engine, "hidden_states", lambda *given: pytest.fail("nothing may be computed"))
    with pytest.raises(UserError, match="5 samples take .* GiB in storage native, and .* are free in .*: set "
                                        "hidden_states.storage=float8_e4m3fn .*hidden_states=hybrid"):
        extract(stage, tmp_path / "states")


def test_what_will_be_written_is_said_before(tiny_target: Target, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    record = extract(make("offline", tiny_target, [1, 2]), tmp_path / "states", random_samples((300,) * 9))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "to extract" in line]
    said = float(line.split()[5]) * 2 ** 30
    assert line.startswith("hidden_states: 9 samples to extract, ") and "are free in" in line
    assert abs(said - record["bytes"]) < 0.02 * record["bytes"] and len(SAMPLES) == 5
