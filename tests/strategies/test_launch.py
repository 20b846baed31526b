"""Processes that are started together end together, and say once what was wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.strategies.launch import launch

PROJECT = str(Path(__file__).parents[2])
CHILD = f"""
import os, sys, time
sys.path.insert(0, {PROJECT!r})
from collections.abc import Callable
from pathlib import Path
from trainer.errors import Several, UserError
from trainer.strategies.launch import reporting
from trainer.strategies.world import World
world, out = World.here(), Path(sys.argv[1])
with reporting(world):
    (out / f"pid{{world.rank}}").write_text(str(os.getpid()))
    while not (out / f"pid{{1 - world.rank}}").exists():
        time.sleep(0.01)
    exec(sys.argv[2])
"""


def command(out: Path, does: str) -> list[str]:
    return [sys.executable, "-c", CHILD, str(out), does]


def alive(out: Path) -> list[int]:
    found = []
    for rank in range(2):
        stat = Path(f"/proc/{(out / f'pid{rank}').read_text()}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            found.append(rank)
    return found


def test_each_knows_its_rank_and_only_the_first_is_heard(tmp_path: Path,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    launch(command(tmp_path, "print(world.rank, world.size, os.environ['OMP_NUM_THREADS'])"), 2)
    assert capfd.readouterr().out == f"0 2 {os.environ.get('OMP_NUM_THREADS') or 1}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_has_to_say_is_said_once_and_the_other_ends(tmp_path: Path, rank: int,
                                                             capfd: pytest.CaptureFixture[str]) -> None:
    speaks = f"time.sleep(600) if world.rank != {rank} else None\n" \
             "raise Several(['train.clip must be larger', 'and lr smaller'])"
    with pytest.raises(UserError, match=r"^train.clip must be larger\nand lr smaller$"):
        launch(command(tmp_path, speaks), 2)
    assert alive(tmp_path) == [] and capfd.readouterr() == ("", "")


def test_the_cause_is_told_and_not_what_followed_from_it(tmp_path: Path) -> None:
    """The first one loses the other, and is the first to end."""
    with pytest.raises(UserError, match="^the cause$"):
        launch(command(tmp_path, "if world.rank == 0: raise RuntimeError('connection closed')\n"
                                 "time.sleep(0.5)\nraise UserError('the cause')"), 2)


def test_a_fault_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with \[0, 1\].*Traceback.*ZeroDivisionError"):
        launch(command(tmp_path, "world.rank and 1 / 0"), 2)


def test_one_that_is_killed_is_told_and_the_other_ends(tmp_path: Path) -> None:
    dies = "os.kill(os.getpid(), 9) if world.rank else time.sleep(600)"
    with pytest.raises(UserError, match="process 1 of 2 that trained was ended by signal SIGKILL; the same"):
        launch(command(tmp_path, dies), 2)
    assert alive(tmp_path) == []


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_their_launcher(tmp_path: Path, sign: signal.Signals) -> None:
    code = (f"import sys; sys.path.insert(0, {PROJECT!r})\nfrom trainer.strategies.launch import launch\n"
            f"launch({command(tmp_path, 'time.sleep(600)')!r}, 2)")
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as launcher:
        wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
        time.sleep(0.2)
        launcher.send_signal(sign)
        launcher.wait(30)
    wait_for(lambda: alive(tmp_path) == [])


def wait_for(done: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)
