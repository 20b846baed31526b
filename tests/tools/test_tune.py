"""`tools/tune.py` and `tools/replay_tuner.py` as from a shell: what they print, write, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_calls import Call, caller

PROJECT = Path(__file__).parents[2]
PUBLISHED, OTHERS = (PROJECT / f"tests/evaluate/{name}_sweeps.json" for name in ("published", "other"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Status, output and errors of a tool with its arguments, in this process."""
    def called(name: str, *arguments: str | Path) -> tuple[int, str, str]:
        return caller(name, monkeypatch, capsys)(*arguments)

    return called


@pytest.mark.parametrize(("path", "series"), [(PUBLISHED, 64), (OTHERS, 20)], ids=["published", "others"])
def test_a_replay_is_one_line_of_json(call: Call, path: Path, series: int) -> None:
    status, out, err = call("replay_tuner", path)
    assert (status, err) == (0, "")
    [line] = out.splitlines()
    found = json.loads(line)
    assert found["series"] == series and found["share_97"] >= 0.95 and found["share_95"] == 1.0
    assert found["measured_a_series"] <= 3 and found["least"] >= 0.95


def test_a_replay_sees_no_more_than_it_may(call: Call) -> None:
    status, out, err = call("replay_tuner", OTHERS, "--budget", "1", "--verbose")
    assert status == 0 and json.loads(out)["measured_a_series"] == 1.0
    assert len(err.splitlines()) == 20
    status, _, err = call("replay_tuner", OTHERS, "--budget", "0")
    assert status == 2 and "a budget of at least 1" in err and len(err.splitlines()) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "exported"
    found.mkdir()
    facts = {"method": "eagle3", "max_k": 4, "default_k": 2, "formats": ["speculators"]}
    (found / "speculator.json").write_text(json.dumps(facts))
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Published rows of one drafter, as if measured with one user, and 0.4 of the speed with sixteen."""
    own: list[dict[str, Any]] = [row for row in json.loads(PUBLISHED.read_text())
                                 if row["method"] == "EAGLE-3" and row["model"].endswith("26B-A4B-it")]
    slower = [{**row, "users": 16, **{name: row[name] * 0.4 for name in ("speedup", "tok_s")}} for row in own]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*({**row, "users": 1} for row in own), *slower]))
    return path


def test_the_exported_folder_is_served_as_recommended(call: Call, rows: Path, folder: Path,
                                                      tmp_path: Path) -> None:
    status, out, err = call("tune", rows, "--export", folder, "--method", "EAGLE-3",
                            "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    [found] = json.loads((tmp_path / "out/tuning.json").read_text())["drafters"]
    facts = json.loads((folder / "speculator.json").read_text())
    schedule = facts["num_speculative_tokens_per_batch_size"]
    assert schedule == found["num_speculative_tokens_per_batch_size"]
    assert schedule[0][:2] != [1, 16] and schedule[-1][1:] == [16, 0] and facts["speculate"]
    assert facts["default_k"] == found["default_k"] <= 4  # K = 5 was measured and is none of the folder's
    assert "K = 5 was measured, and is none that this drafter has" in out.replace("\n", " ")
    assert "do not speculate" in out and f'"num_speculative_tokens_per_batch_size": {schedule}' in out


def test_without_a_folder_it_recommends_alone(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("tune", PUBLISHED, "--out", tmp_path, "--k", "3", "--k", "7")
    drafters = json.loads((tmp_path / "tuning.json").read_text())["drafters"]
    assert status == 0 and len(drafters) == 16 and {each["default_k"] for each in drafters} <= {3, 7, None}
    assert "MATH500" in out and "does not batch the queries" in out


def test_a_length_beyond_the_drafter_s_is_refused(call: Call, rows: Path, folder: Path,
                                                  tmp_path: Path) -> None:
    status, _, err = call("tune", rows, "--export", folder, "--method", "EAGLE-3", "--k", "2", "--k", "5",
                          "--out", tmp_path)
    assert status == 2 and "--k 5 is a draft length that no server takes of the drafter in" in err
    assert "give some of 1, 2, 3, 4" in err and not (tmp_path / "tuning.json").exists()


def test_what_does_not_fit_is_one_sentence(call: Call, rows: Path, folder: Path, tmp_path: Path) -> None:
    for arguments, text in (((tmp_path / "none.json",), "none.json cannot be read (No such file"),
                            ((rows, "--export", tmp_path), "speculator.json cannot be read"),
                            ((rows, "--export", folder), "no drafter of the method 'eagle3'")):
        status, _, err = call("tune", *arguments, "--out", tmp_path)
        assert status == 2 and text in err and len(err.splitlines()) == 1
    assert json.loads((folder / "speculator.json").read_text())["default_k"] == 2
