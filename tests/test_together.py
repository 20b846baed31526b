"""Two processes train through the command line, end as one, and go on after any of them was killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from runs import Home, environment, quick, told, wait_until
from safetensors.torch import load_file

from trainer.strategies.world import REPORT

SMALL = ["recipe=smoke", "hardware.compile=false", "evaluate.server=null", "prompts.limit=16",
         "prompts.heldout=2", "responses.sampling.max_new_tokens=12", "train.accumulate=2", "train.steps=24",
         "train.acceptance.every=null", "train.runtime.checkpoint_every=2",
         "train.heldout_every=12", "hardware.precision=float32"]
DATA = "run=[prompts,responses,hidden_states]"
TRAIN = "run=[train]"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """All that training reads."""
    folder = tmp_path_factory.mktemp("data")
    home = Home(folder / "home", folder / "cache")
    home.call(*SMALL, DATA)
    return home


@pytest.fixture
def home(data: Home, tmp_path: Path) -> Home:
    made = Home(tmp_path / "home", data.cache)
    shutil.copytree(data.root, made.root, symlinks=True)
    return made


@pytest.fixture(scope="module")
def unbroken(data: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage `train` of two processes."""
    made = Home(tmp_path_factory.mktemp("unbroken") / "home", data.cache)
    shutil.copytree(data.root, made.root, symlinks=True)
    out = made.call(*SMALL, TRAIN, "hardware=cpu2")
    assert "train: 2 processes have met, the first on cpu, strategy ddp" in out
    return made.stage("train")


def test_one_process_and_two_make_the_same_stage(unbroken: Path, home: Home) -> None:
    """Strategy and processes are no part of the fingerprint; the weights differ by rounding."""
    home.call(*SMALL, TRAIN)
    assert home.stage("train").name == unbroken.name
    weights, found = (load_file(folder / "weights.safetensors") for folder in (home.stage("train"), unbroken))
    assert weights.keys() == found.keys()
    assert all(float((weights[name] - found[name]).norm()) < 1e-3 * float(weights[name].norm())
               for name in weights)
    assert not (unbroken / "record.json").exists()


def test_what_one_process_says_is_told_once(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Here by both of them."""
    line = told(*quick(home, capfd, *SMALL, TRAIN, "hardware=cpu2", "train.tokens=100"))
    assert "train.tokens=100, the length of a packed row" in line


@pytest.mark.parametrize(("settings", "said"), [
    (["hardware=cpu2", "train.accumulate=3"], "train.accumulate (command line): must be a multiple of "
                                              "hardware.processes=2"),
    (["hardware.processes=2"], "strategy (conf/strategy/single.yaml): must be another one than single"),
    (["strategy=ddp"], "strategy (conf/strategy/ddp.yaml): must be single with hardware.processes=1"),
    (["hardware=cpu2", "hidden_states=online"],
     "hidden_states (conf/hidden_states/online.yaml): must be offline with several"),
    (["hardware=cpu2", "strategy=fsdp2", "optimizer=muon"], "needs whole matrices")])
def test_what_does_not_go_together_is_told(data: Home, capfd: pytest.CaptureFixture[str],
                                           settings: list[str], said: str) -> None:
    assert said in told(*quick(data, capfd, *SMALL, TRAIN, "--check", *settings))


def test_more_processes_than_samples_are_refused(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["hardware=cpu2", "hardware.processes=99", "train.accumulate=99", "--check"]
    assert "hardware.processes=99 is more than the " in told(*quick(home, capfd, *SMALL, TRAIN, *settings))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def ranks(home: Home, port: int, count: int, *settings: str) -> list[subprocess.Popen[str]]:
    """The same command in `count` tasks, as srun starts them; the later ones a moment late."""
    found = []
    for rank in range(count):
        own = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_LOCALID": str(rank),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "trainer", *home.arguments(*settings)]
        found.append(subprocess.Popen(command, cwd=home.folder, env=environment() | own, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        time.sleep(0.5)
    return found


def test_tasks_of_slurm_find_each_other_and_one_of_them_prepares(unbroken: Path, home: Home) -> None:
    """The second waits while the first makes the data, which alone takes it through all stages."""
    shutil.rmtree(home.root / "hidden_states")
    run = "run=[prompts,responses,hidden_states,train]"
    tasks = ranks(home, free_port(), 2, *SMALL, run, "hardware=cpu2")
    said = [task.communicate(timeout=300) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "train: " not in said[1][0] and "hidden_states: done" in said[0][0]
    assert (home.stage("train") / "weights.safetensors").read_bytes() == \
        (unbroken / "weights.safetensors").read_bytes()


@pytest.mark.slow
def test_torchrun_starts_them_too(unbroken: Path, home: Home) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
               "trainer", *home.arguments(*SMALL, TRAIN, "hardware=cpu2")]
    done = subprocess.run(command, cwd=home.folder, env=environment(), capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0 and done.stdout.count("train: done") == 1, done.stdout + done.stderr
    check_same(unbroken, home.stage("train"))


def test_what_was_started_must_be_what_was_asked_for(data: Home) -> None:
    command = [sys.executable, "-m", "trainer", *data.arguments(*SMALL, TRAIN)]
    own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(command, env=environment() | own, cwd=data.folder, capture_output=True, text=True)
    assert done.returncode == 2 and "2 processes were started, but hardware.processes=1" in done.stderr


def test_a_port_that_is_taken_is_told(data: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tasks = ranks(data, port, 2, *SMALL, TRAIN, "hardware=cpu2")
        try:
            said = tasks[0].communicate(timeout=100)[1]
        finally:
            for task in tasks:
                task.kill()
                task.wait()
    assert tasks[0].returncode == 2 and f"cannot meet the others at 127.0.0.1:{port}" in said
    assert "set MASTER_PORT to one that is free" in said


def children(launcher: int) -> dict[int, int]:
    """The processes that train by their rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = dict(pair.split("=", 1) for pair in (entry / "environ").read_text().split("\0")
                             if "=" in pair)
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == launcher \
                    and REPORT in variables:
                found[int(variables["RANK"])] = int(entry.name)
    return found


def stop_somewhere(home: Home, chance: random.Random) -> str:
    """Starts the training, and kills one of its processes at a random moment."""
    with home.shell(*SMALL, TRAIN, "hardware=cpu2") as process:
        before = home.parts("train")
        wait_until(lambda: home.parts("train") > before or process.poll() is not None,
                   lambda: True, home)
        time.sleep(chance.uniform(0, 0.5))
        victims = {"launcher": process.pid, **{f"rank {rank}": pid
                                               for rank, pid in children(process.pid).items()}}
        name = chance.choice(sorted(victims))
        orphans = [pid for pid in victims.values() if pid != process.pid]
        with suppress(ProcessLookupError):
            os.kill(victims[name], signal.SIGKILL)
        process.wait(60)
        wait_until(lambda: not any(running(pid) for pid in orphans), lambda: True, home)
        if name != "launcher" and process.returncode:
            assert process.returncode == 2, home.err
            assert f"process {name[-1]} of 2 that trained was ended by signal SIGKILL" in home.err
    return name


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def check_same(unbroken: Path, found: Path) -> None:
    assert found.name == unbroken.name
    for name in ("weights.safetensors", "checkpoints/step_000024/optimizer.safetensors"):
        assert (found / name).read_bytes() == (unbroken / name).read_bytes()


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_with_the_same_bits(unbroken: Path, home: Home, kills: int) -> None:
    chance, left, victims = random.Random(kills), kills, []
    while left:
        victims.append(stop_somewhere(home, chance))
        left -= 1
        for folder in (home.root / "train").glob("*.partial/checkpoints/step_??????"):
            assert (folder / "state.json").is_file(), "nothing half-written has a final name"
        if not list((home.root / "train").glob("*.partial")):
            check_same(unbroken, home.stage("train"))
            shutil.rmtree(home.root / "train")  # and once more from the beginning
    home.call(*SMALL, TRAIN, "hardware=cpu2")
    check_same(unbroken, home.stage("train"))
    assert len(victims) == kills and (kills < 30 or {*victims} == {"launcher", "rank 0", "rank 1"})
