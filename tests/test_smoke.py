"""The whole path on a random tiny target, through the command line: all stages, every kind of interruption,
and last of all a real vLLM server.

Interrupted runs are processes of their own, stopped as soon as a stage has written a part of its result.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from runs import ALONE, COMMITS, PATIENCE, SMOKE, STAGES, Home, check_went_on, quick, told, wait_until
from vllm_support import FEW, kill_worker, own_cores, vllm_python

from trainer import pipeline
from trainer.engines import vllm_process
from trainer.errors import UserError

# many small parts, so that a stage is stopped in its middle and not after it
SLOW = [*ALONE, "prompts.heldout=8", "responses.sampling.max_new_tokens=24", "target_engine.batch=8",
        "evaluate.prompts=8", *COMMITS, "train.tokens=640", "train.steps=60",
        "train.runtime.checkpoint_every=4"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Home:
    home = Home(tmp_path_factory.mktemp("unbroken"), cache)
    with home.shell(*SLOW) as process:
        assert process.wait(timeout=PATIENCE) == 0, home.out + home.err
    return home


@pytest.fixture
def home(tmp_path: Path, cache: Path) -> Home:
    return Home(tmp_path / "home", cache)


def test_all_stages_in_order(unbroken: Home) -> None:
    assert unbroken.err == "", "nothing went wrong, so there is nothing to complain of"
    report = Path(unbroken.out.splitlines()[-1])
    assert report == unbroken.stage("report") / "report.json"
    content = json.loads(report.read_text())
    assert content["gates"] and all(gate["passed"] for gate in content["gates"].values())
    assert {row["engine"] for row in content["rows"]} == {"in_process"}
    assert all(row["lossless"] for row in content["rows"])
    assert content["rows"][0]["mean_accepted_length"] > 1.05, "so small a target lets its drafter learn"
    assert set(content["stages"]) >= set(STAGES[:-1])
    assert (report.parent / "report.html").stat().st_size > 10_000
    for form in ("speculators", "native"):
        assert (unbroken.stage("export") / form / "model.safetensors").is_file()


def test_a_finished_run_does_nothing(unbroken: Home, capfd: pytest.CaptureFixture[str]) -> None:
    before = times(unbroken)
    status, out, err = quick(unbroken, capfd, *SLOW)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:1 + len(STAGES)]] == [[stage, "reuse"] for stage in STAGES]
    assert lines[1 + len(STAGES):] == unbroken.out.splitlines()[-len(lines) + 1 + len(STAGES):]
    assert sum(line.startswith(f"serve it: vllm serve {unbroken.cache}/targets/") for line in lines) == 1
    assert lines[-1] == str(unbroken.stage("report") / "report.json")
    assert str(unbroken.stage("report") / "report.html") in lines
    assert any(line.startswith("smoke: accepted length ") for line in lines)
    assert times(unbroken) == before


def test_every_file_has_the_mode_of_the_umask(unbroken: Home) -> None:
    found = {path: oct(path.stat().st_mode & 0o777) for path in unbroken.root.rglob("*") if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    assert {path: mode for path, mode in found.items() if mode != oct(0o666 & ~umask)} == {}


def test_no_file_of_a_finished_run_changes_unseen(unbroken: Home, capfd: pytest.CaptureFixture[str]) -> None:
    files = [(unbroken.stage(stage), path) for stage in STAGES for path in unbroken.stage(stage).rglob("*")
             if path.is_file() and path.name != "stage.json"]
    names = {str(path.relative_to(folder)) for folder, path in files}
    assert names > {"prompts.jsonl", "responses.jsonl", "manifest.json", "weights.safetensors", "rows.json",
                    "token_counts.safetensors", "speculators/model.safetensors", "export.json", "report.json"}
    for folder, path in files:
        content, stamp = path.read_bytes(), path.stat().st_mtime_ns
        apart = path.suffix == ".bin" or "checkpoints" in path.parts  # these have checksums of their own
        path.write_bytes(content[:-3] if apart else bytes([content[0] ^ 1]) + content[1:])
        try:
            with pytest.raises(UserError, match=f"^{path} is not as .*; remove {folder} and run the same c"):
                pipeline.require_unchanged(folder)
            if path.name == "export.json":
                assert str(path) in told(*quick(unbroken, capfd, *SLOW))
        finally:
            path.write_bytes(content)
            os.utime(path, ns=(stamp, stamp))


def times(home: Home) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for stage in STAGES for path in home.stage(stage).rglob("*")}


def test_a_stopped_run_goes_on_to_the_same_bytes(unbroken: Home, home: Home) -> None:
    """Each of the long stages is killed in its middle, and then asked to stop further on."""
    for stage in ("responses", "hidden_states", "train"):
        for number in (signal.SIGKILL, signal.SIGTERM):
            stop_within(home, stage, number)
            if stage != "responses" or number == signal.SIGTERM:
                check_went_on(home.out, stage if number == signal.SIGTERM else earlier(stage))
    check_went_on(home.call(*SLOW), "train")
    for name, pattern in (("responses", "responses.jsonl"), ("hidden_states", "*.bin"),
                          ("hidden_states", "manifest.json"), ("train", "*.safetensors"),
                          ("export", "*/*.safetensors")):
        ours, theirs = (contents(each.stage(name), pattern) for each in (home, unbroken))
        assert ours.keys() == theirs.keys() and ours, name
        assert [path for path in ours if ours[path] != theirs[path]] == []


def contents(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob(pattern)}


def earlier(stage: str) -> str:
    return STAGES[STAGES.index(stage) - 1]


def stop_within(home: Home, stage: str, number: signal.Signals) -> None:
    before = home.parts(stage)
    run = home.start(*SLOW)
    try:
        wait_until(lambda: home.parts(stage) > before, run.is_alive, home)
        os.kill(run.pid, number)
        run.join(timeout=PATIENCE)
    finally:
        run.kill()
    if number == signal.SIGTERM:
        assert run.exitcode == 143 and home.err == "stopped; the same command goes on from here\n", home.err
    else:
        assert run.exitcode == -signal.SIGKILL
    assert home.parts(stage) > before, f"{stage} was to be stopped in its middle"


@pytest.mark.vllm
def test_a_server_killed_in_the_middle_and_the_whole_run(home: Home) -> None:
    """The engine's process is killed while it answers; the same command then measures to the end."""
    settings = [*SMOKE, f"engine.python={vllm_python()}", "engine.max_model_len=1024",
                "engine.max_num_seqs=4", "engine.runtime.kv_cache_gib=1", "evaluate.prompts=8",
                "evaluate.sampling.max_new_tokens=48",
                f"engine.runtime.threads='{own_cores()[0]}'", *FEW]
    with home.shell(*settings) as process:
        wait_until(lambda: "is up after" in home.err, lambda: process.poll() is None, home)
        groups = [int(child) for thread in Path(f"/proc/{process.pid}/task").glob("*/children")
                  for child in thread.read_text().split()]
        kill_worker(groups[0])
        assert process.wait(timeout=PATIENCE) == 2
    complaint = [line for line in home.err.splitlines() if not re.match("starting|vLLM server for", line)]
    assert "the vLLM server ended with" in told(2, home.out, "\n".join(complaint))
    assert len(groups) == 2 and [vllm_process.members(group) for group in groups] == [[], []]
    check_went_on(home.call(*settings), "evaluate")
    report = json.loads(Path(home.out.splitlines()[-1]).read_text())
    assert {"served_lossless", "served_accepted_length_gap", "served_acceptance_by_position_gap"} <= {
        name.rpartition("/")[2] for name, gate in report["gates"].items() if gate["passed"]}
    served = [row for row in report["rows"] if row["engine"] == "vllm"]
    assert len(served) == 1 and served[0]["lossless"] and served[0]["tok_s"] > 0 and served[0]["drafts"] > 0
