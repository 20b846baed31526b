"""How a drafter came about, from the records of the stages behind it; and a command that repeats it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainer._folders import write_sealed
from trainer._paths import find
from trainer._stage_record import made_by
from trainer.compose import compose_configuration
from trainer.export.provenance import provenance, read_provenance, write_provenance

OWN = {"dtype": "float32"}
DIGESTS = {name: str(number) * 64 for number, name in enumerate(
    ("prompts", "responses", "hidden_states", "train"), 1)}


def finished(root: Path, name: str, *upstream: str, **changes: Any) -> Path:
    """A stage's folder, with its record alone."""
    folder = root / name / DIGESTS[name][:16]
    folder.mkdir(parents=True)
    write_sealed(folder / "stage.json", {
        "stage": name, "fingerprint": DIGESTS[name], "settings": {"seed": 1, "path": f"{Path.home()}/mine"},
        "inputs": {each: DIGESTS[each] for each in upstream}, "record": {}, "seconds": 1.0, **made_by(),
        **changes})
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    finished(tmp_path, "prompts")
    responses = finished(tmp_path, "responses", "prompts")
    states = finished(tmp_path, "hidden_states", "responses")
    train = finished(tmp_path, "train", "responses", "hidden_states", commit="a" * 40,
                     versions={"torch": "1"})
    return {"responses": responses, "hidden_states": states, "train": train}


def test_all_stages_behind_it_are_told_and_what_ran_them_where_it_differs(inputs: dict[str, Path],
                                                                          tmp_path: Path) -> None:
    write_provenance(tmp_path, provenance(inputs, "some", "[]", None, OWN))
    found, here = read_provenance(tmp_path), made_by()
    assert {name: each["fingerprint"] for name, each in found["stages"].items()} == DIGESTS
    assert [*found["stages"]] == [*DIGESTS] and found["export"] == OWN
    assert {key: found[key] for key in here} == here
    assert found["stages"]["train"]["versions"] == {"torch": "1"}
    assert found["stages"]["train"]["commit"] == "a" * 40 and "hardware" not in found["stages"]["train"]
    assert {*found["stages"]["responses"]} == {"fingerprint", "settings"}
    assert found["stages"]["responses"]["settings"]["path"] == "~/mine"
    assert str(Path.home()) not in (tmp_path / "provenance.json").read_text()


def test_folders_of_older_runs_are_told_as_far_as_they_go(inputs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "prompts" / DIGESTS["prompts"][:16] / "stage.json").unlink()
    found = provenance(inputs, None, None, None, OWN)
    assert {*found["stages"]} == {*DIGESTS} - {"prompts"} and found["repeat"] is None
    assert read_provenance(tmp_path) == {}


def test_the_command_leaves_out_the_machine_and_pins_branches(inputs: dict[str, Path]) -> None:
    words = ["recipe=other", "run=[train]", "run_root=/tmp/x", "cache_root=~/c",
             "target.source.revision=main", "train.epochs=2", "export.hub.repo=me/mine",
             "export.hub={repo: me/mine}", "+train.more='a b'", "run_rooty=1"]
    found = provenance(inputs, "some", json.dumps(words), "c" * 40, OWN)["repeat"]
    assert shlex.split(found) == ["python", "-m", "trainer", "recipe=some", "train.epochs=2",
                                  "+train.more='a b'", "run_rooty=1", f"target.source.revision={'c' * 40}"]


def test_no_password_gets_into_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a value, not inside one, and not through what a `${...}` leads to."""
    monkeypatch.setenv("SOME_KEY", "sesame")
    given = ["recipe=smoke", "+engine.environment.OTHER_API_KEY=sesame",
             "engine.arguments=[--api-key,sesame,--seed,1]", "run_root='/tmp/${oc.env:SOME_KEY}'",
             "~train.steps", "train.epochs=3"]
    settings = compose_configuration(given, find()).settings
    assert "sesame" in settings["run_root"] and "sesame" not in settings["export"]["command"]
    assert "$" not in settings["export"]["command"] and settings["export"]["recipe"] == "smoke"
    assert json.loads(settings["export"]["command"]) == [
        "recipe=smoke", "+engine.environment.OTHER_API_KEY=***", "engine.arguments=***",
        "run_root='/tmp/${oc.env:SOME_KEY}'", "~train.steps", "train.epochs=3"]
