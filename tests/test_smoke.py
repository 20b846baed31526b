"""The whole path on a random tiny target, through the command line: all stages, every kind of interruption,
and what a user can get wrong; last of all with a real vLLM server.

Interrupted runs are processes of their own, stopped as soon as a stage has written a part of its result. They
are forked from a server that has imported torch already, which is most of what a small run costs.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm_support import vllm_python

from trainer.__main__ import main
from trainer.engines import vllm_process

PROJECT = Path(__file__).resolve().parents[1]
SMOKE = ["recipe=smoke", "hardware.compile=false"]
ALONE = [*SMOKE, "evaluate.server=null"]
# many small parts, so that a stage is stopped in its middle and not after it
SLOW = [*ALONE, "prompts.limit=120", "target_engine.batch=8", "hidden_states.shard_tokens=500",
        "train.tokens=640", "train.steps=60", "train.runtime.checkpoint_every=4"]
PARTS = {"responses": "responses.jsonl", "hidden_states": "shard-*.safetensors",
         "train": "checkpoints/step_??????"}
PATIENCE = 550  # seconds; a busy machine is no fault
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trainer.training.stage", "trainer.engines.transformers",
                              "trainer.evaluate.report", "transformers.models.llama.modeling_llama"])
Run = multiprocessing.process.BaseProcess
STAGES = ("prompts", "responses", "hidden_states", "train", "export", "evaluate", "report")


def forked(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment())
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    torch.set_num_threads(1)
    sys.exit(main(arguments))


def environment() -> dict[str, str]:
    """One thread, as the machine is shared."""
    plain = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return plain | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


class Home:
    """A place for runs: the random target is kept in `cache`, results lie below `root`."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.root, self.cache, self.folder = folder / "runs", cache, folder
        folder.mkdir(exist_ok=True)

    def arguments(self, *settings: str) -> list[str]:
        return [*settings, f"run_root={self.root}", f"cache_root={self.cache}"]

    def start(self, *settings: str) -> Run:
        """The command line in a process of its own, its output in `out` and `err`."""
        run = FORKS.Process(target=forked, args=(self.folder, self.arguments(*settings)))
        run.start()
        return run

    def call(self, *settings: str, expected: int = 0) -> str:
        """The same to its end."""
        run = self.start(*settings)
        try:
            run.join(timeout=PATIENCE)
        finally:
            run.kill()
        assert run.exitcode == expected, self.out + self.err
        return self.out

    @contextlib.contextmanager
    def shell(self, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """The same as a user starts it, with nothing imported yet."""
        command = [sys.executable, "-m", "trainer", *self.arguments(*settings)]
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=err, env=environment())
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def stage(self, name: str) -> Path:
        found = [path for path in (self.root / name).iterdir() if path.is_dir()]
        assert len(found) == 1 and found[0].suffix != ".partial", found
        return found[0]

    def parts(self, stage: str) -> int:
        """How much of a stage that is not finished lies on the disk, in any unit that grows."""
        found = list((self.root / stage).glob(f"*.partial/{PARTS[stage]}"))
        if stage == "responses":
            return sum(path.stat().st_size for path in found)
        return max((int(path.stem[-6:].strip("-_")) + 1 for path in found), default=0)


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


def quick(home: Home, capfd: pytest.CaptureFixture[str], *settings: str) -> tuple[int, str, str]:
    """The same command line inside this process: status, output, errors."""
    capfd.readouterr()
    status = main(home.arguments(*settings))
    return status, *capfd.readouterr()


def told(status: int, out: str, err: str) -> str:
    """The one line that a user is told, who has something to mend."""
    assert status == 2 and "Traceback" not in out + err, out + err
    assert len(err.splitlines()) == 1 and err.startswith("error: "), err
    return err


def test_all_stages_in_order(unbroken: Home) -> None:
    assert unbroken.err == "", "nothing went wrong, so there is nothing to complain of"
    report = Path(unbroken.out.splitlines()[-1])
    assert report == unbroken.stage("report") / "report.json"
    content = json.loads(report.read_text())
    assert content["gates"] and all(gate["passed"] for gate in content["gates"].values())
    assert {row["engine"] for row in content["rows"]} == {"in_process"}
    assert all(row["lossless"] for row in content["rows"])
    assert set(content["stages"]) >= set(STAGES[:-1])
    assert (report.parent / "report.html").stat().st_size > 10_000
    for form in ("speculators", "native"):
        assert (unbroken.stage("export") / form / "model.safetensors").is_file()


def test_a_finished_run_does_nothing(unbroken: Home, capfd: pytest.CaptureFixture[str]) -> None:
    before = times(unbroken)
    status, out, err = quick(unbroken, capfd, *SLOW)
    assert (status, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:-1]] == [[stage, "reuse"] for stage in STAGES]
    assert out.splitlines()[-1] == str(unbroken.stage("report") / "report.json")
    assert times(unbroken) == before


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
    for name, pattern in (("responses", "responses.jsonl"), ("hidden_states", "shard-*"),
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


def wait_until(condition: Callable[[], bool], alive: Callable[[], bool], home: Home) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert alive(), f"ended before it could be stopped\n{home.out}{home.err}"
        assert time.monotonic() < deadline, home.out + home.err
        time.sleep(0.002)


def check_went_on(out: str, stage: str) -> None:
    """`stage` was continued, those before it were left alone."""
    states = dict(line.split()[:2] for line in out.splitlines()[1:1 + len(STAGES)])
    done = STAGES[:STAGES.index(stage)]
    assert [states[name] for name in done] == ["reuse"] * len(done)
    assert states[stage] == "continue" and f"{stage}: continue" in out.splitlines(), out


PROMPTS = {
    "empty": ("", "prompts.jsonl holds no prompt"),
    "blank lines": ("\n\n", "prompts.jsonl holds no prompt"),
    "malformed": ('{"turns": ["hello"]}\n{"turns": ["hello"\n', "prompts.jsonl, line 2: not valid JSON"),
    "no turns": ('{"text": "hello"}\n', 'prompts.jsonl, line 1: expected an object with "turns"'),
    "too long": (json.dumps({"turns": ["word " * 300]}) + '\n{"turns": ["hi"]}\n', "prompt row-1 has 15"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompts(home: Home, capfd: pytest.CaptureFixture[str], case: str) -> None:
    text, expected = PROMPTS[case]
    path = home.folder / "prompts.jsonl"
    path.write_text(text)
    result = quick(home, capfd, *ALONE, "prompts=jsonl", f"prompts.source.path={path}", "prompts.heldout=0",
                   "run=[prompts,responses]")
    assert expected in told(*result)
    assert not list(home.root.glob("responses/*/responses.jsonl"))


@pytest.fixture(scope="module")
def tiny_folder(unbroken: Home) -> Path:
    """The random target's own folder, which the first run has made."""
    return next((unbroken.cache / "targets").iterdir())


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_a_failing_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('users must not speak first') }}")


def with_a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


TARGETS = {without_tokenizer: "has no tokenizer", without_a_shard: "lacks 1 of the 2 shards",
           with_a_failing_template: "users must not speak first", with_a_broken_template: "chat template of"}


@pytest.mark.parametrize("spoil", TARGETS)
def test_bad_targets(home: Home, tiny_folder: Path, capfd: pytest.CaptureFixture[str],
                     spoil: Callable[[Path], None]) -> None:
    folder = home.folder / "target"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    result = quick(home, capfd, *ALONE, "target=folder", "target.name=mine", f"target.source.path={folder}",
                   "target.mask_token='<|mask|>'", "target.tap_layers=[1,2]")
    assert TARGETS[spoil] in told(*result) and str(folder) in result[2]
    assert not list(home.root.glob("responses/*/responses.jsonl"))


def test_no_work_for_a_server_that_cannot_start(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = told(*quick(home, capfd, *SMOKE, "engine.python=/nonexistent/python"))
    assert "engine.python=/nonexistent/python does not run" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = told(*quick(home, capfd, *SMOKE, f"engine.python={vllm_python()}",
                           f"engine.runtime.port={port}"))
    assert f"engine.runtime.port={port} cannot be used" in line
    assert not home.root.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, half a megabyte large."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root alone")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(home: Home, small_disk: Path) -> None:
    home.root = small_disk / "runs"
    settings = [*ALONE, "hidden_states.shard_tokens=500", "run=[prompts,responses,hidden_states]"]
    home.call(*settings, expected=2)
    line = told(2, home.out, home.err)
    assert "the disk is full: stage 'hidden_states'" in line and str(small_disk) in line
    kept = (home.stage("responses") / "responses.jsonl").read_bytes()
    written = home.parts("hidden_states")
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    check_went_on(home.call(*settings), "hidden_states")
    assert written > 0 and (home.stage("responses") / "responses.jsonl").read_bytes() == kept


@pytest.mark.vllm
def test_a_server_killed_in_the_middle_and_the_whole_run(home: Home) -> None:
    """The engine's process is killed while it answers; the same command then measures to the end."""
    settings = [*SMOKE, f"engine.python={vllm_python()}", "engine.max_model_len=1024",
                "engine.max_num_seqs=4", "engine.runtime.kv_cache_gib=1", "evaluate.prompts=8",
                "evaluate.sampling.max_new_tokens=48",
                f"engine.runtime.threads='{min(os.sched_getaffinity(0))}'"]
    with home.shell(*settings) as process:
        wait_until(lambda: "is up after" in home.err, lambda: process.poll() is None, home)
        group = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(max(vllm_process.members(group), key=resident), signal.SIGKILL)
        assert process.wait(timeout=PATIENCE) == 2
    complaint = [line for line in home.err.splitlines() if not re.match("starting|vLLM server for", line)]
    assert "the vLLM server ended with" in told(2, home.out, "\n".join(complaint))
    assert vllm_process.members(group) == []
    check_went_on(home.call(*settings), "evaluate")
    report = json.loads(Path(home.out.splitlines()[-1]).read_text())
    assert {"served_lossless", "served_accepted_length_gap"} <= {
        name.rpartition("/")[2] for name, gate in report["gates"].items() if gate["passed"]}
    served = [row for row in report["rows"] if row["engine"] == "vllm"]
    assert len(served) == 1 and served[0]["lossless"] and served[0]["tok_s"] > 0 and served[0]["drafts"] > 0


def resident(process: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return 0
