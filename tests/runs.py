"""Runs of the command line for tests: in this process, as forks, or as a user starts them.

Forks come from a server that has imported torch already, which is most of what a small run costs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forks import FORKS

from trainer.__main__ import main

PROJECT = Path(__file__).resolve().parents[1]
SMOKE = ["recipe=smoke", "hardware.compile=false"]
ALONE = [*SMOKE, "evaluate.server=null"]
COMMITS = ["hidden_states.runtime.shard_gib=0.0003", "hidden_states.runtime.commit_tokens=100"]  # many
PARTS = {"responses": "responses.jsonl", "hidden_states": "index.bin", "train": "checkpoints/step_??????"}
PATIENCE = 550  # seconds; a busy machine is no fault
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
        if stage != "train":
            return sum(path.stat().st_size for path in found)
        return max((int(path.stem[-6:].strip("-_")) + 1 for path in found), default=0)


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
