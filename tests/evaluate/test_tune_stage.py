"""Stage `tune`: from the rows of finished stages into the exported folders, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_traffic import sweep
from tiny import make_small

from trainer import pipeline
from trainer._paths import find
from trainer.check import check
from trainer.compose import compose_configuration
from trainer.evaluate.tune import Tune, TuneSweep


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    facts = {"method": "dflash", "max_k": 3, "default_k": 3, "formats": ["native"]}
    for name in ("export/native", "evaluate", "sweep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "export/export.json").write_text(json.dumps({**facts, "serve_commands": {}}))
    (tmp_path / "export/native/speculator.json").write_text(json.dumps(facts))
    (tmp_path / "evaluate/rows.json").write_text(json.dumps(sweep(slope=0.05)))
    (tmp_path / "sweep/rows.json").write_text(json.dumps(
        [each for users, slope in {1: 0.05, 16: 1.2}.items() for each in sweep(users=users, slope=slope)]
        + sweep(method="ngram", keep=0.2)))
    return {name: tmp_path / name for name in ("export", "evaluate", "sweep")}


def test_the_exported_folders_are_tuned(inputs: dict[str, Path], tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths beyond the drafter's are not chosen; other methods in the rows are told and not written."""
    found = {}
    for number, stage in enumerate((Tune(make_small("dflash")), TuneSweep(make_small("dflash")))):
        out = tmp_path / f"out{number}"
        out.mkdir()
        record = stage.run(inputs, out)
        facts = json.loads((inputs["export"] / "native/speculator.json").read_text())
        assert record["k"] == facts["default_k"] == 3 and record["speculate"]
        assert record["schedule"] == facts["num_speculative_tokens_per_batch_size"]
        stage.tell(out)
        found[stage.after[-1]] = record["schedule"]
    assert found["evaluate"] == [[1, 1, 3]]
    assert found["sweep"][0][2] == 3 and found["sweep"][-1][1:] == [16, 0]
    out = capsys.readouterr().out
    assert "dflash for org/target: K = 3" in out and "ngram for org/target: do not speculate" in out


def test_a_length_that_no_server_takes_is_not_chosen(inputs: dict[str, Path], tmp_path: Path) -> None:
    path = inputs["export"] / "export.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "possible_k": [1, 2]}))
    assert Tune(make_small("dflash")).run(inputs, tmp_path)["k"] == 2


@pytest.mark.parametrize("option", ["evaluate", "sweep"])
def test_both_options_compose(option: str) -> None:
    configuration = compose_configuration(["recipe=smoke", f"tune={option}"], find())
    assert check(configuration, find().groups(), pipeline.Stage) == []
    assert pipeline.build(configuration.settings["tune"], "tune").after == ("export", option)
