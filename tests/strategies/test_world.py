"""Which of how many processes this one is, as torchrun, Slurm and the launcher say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.engines.vllm_installation import Installation
from trainer.errors import UserError
from trainer.strategies.process import joined
from trainer.strategies.world import AGENT, REPORT, VARIABLES, World, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
            AGENT: "True"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70123",
         "SLURM_STEP_NODELIST": "gpu[07-08,12],other3"}


def test_the_environment_says_which_process_this_is() -> None:
    assert World.here({}) == World.here({"RANK": "0", "WORLD_SIZE": "1"}) == World()
    assert World.here(TORCHRUN) == World(3, 4, 1, "node1", 29500, hosted=True)
    assert World.here(SLURM) == World(3, 4, 1, "gpu07", 20123, hosted=False)
    assert World.here(SLURM | TORCHRUN) == World.here(TORCHRUN), "torchrun under Slurm counts its own"
    assert World.here(SLURM | {"MASTER_ADDR": "here", "MASTER_PORT": "5"}).address == "here"
    # a batch script, which has the number of tasks of its job and is one process
    assert World.here({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == World()


@pytest.mark.parametrize(("hosts", "first"), [("node1", "node1"), ("node1,node2", "node1"),
                                              ("gpu[07-08,12],x", "gpu07"), ("a[3]-ib,b", "a3-ib")])
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_who_follows_and_computes_where() -> None:
    first, second = World.here(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}), World.here(TORCHRUN)
    assert second.follows and not first.follows and not World().follows
    assert World.here(TORCHRUN | {"RANK": "0", REPORT: "/tmp/x"}).follows, "its launcher leads"
    assert [each.device("cuda") for each in (World(), first, second)] == ["cuda", "cuda:0", "cuda:1"]
    assert second.device("cpu") == "cpu" and second.device("cuda:7") == "cuda:7"


def test_another_number_of_processes_than_was_asked_for_is_refused() -> None:
    with pytest.raises(UserError, match="hardware.processes=2, but 1 process was started; set it to 1"), \
            joined(World(), "cpu", 2):
        raise AssertionError("never reached")
    with pytest.raises(UserError, match="hardware.processes=1, but 4 processes were started"), \
            joined(World.here(TORCHRUN), "cpu", 1):
        raise AssertionError("never reached")


def test_a_server_does_not_take_the_ranks_for_its_own(monkeypatch: pytest.MonkeyPatch,
                                                      tmp_path: Path) -> None:
    for name, value in {**TORCHRUN, **SLURM}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEPT", "1")
    found = Installation("python", "0.32.0+cpu", tmp_path, named=True).environment("0", 1)
    assert found["KEPT"] == "1" and not found.keys() & {*VARIABLES}
