"""Which of how many processes this one is, as its environment says: that of torchrun, of Slurm, or of this
program's own launcher, which speaks as torchrun does. Without any of them it is alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

REPORT = "TRAINER_PROCESS_REPORT"  # of a process that was launched: where it says why it failed
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # whether whoever started the processes keeps the store they meet in
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # what an earlier attempt left in that store is not for this one
# What a program that this one starts must not take for its own, such as a server that has ranks, too.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
             "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", REPORT, AGENT,
             ATTEMPT, "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
             "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
PORT, PORTS = 20_000, 10_000  # Slurm names no port: one of these, by the number of the job


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, number `local_rank` on its machine. They meet at `address` and `port`, in a
    store that the first one keeps unless it is `hosted` elsewhere; `report` is the file of `REPORT`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    attempt: str = "0"
    report: str | None = None

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> World:
        own = dict(environment)
        if "RANK" not in own and int(own.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            own = _of_slurm(own) | own
        if "RANK" not in own or int(own.get("WORLD_SIZE", "1")) == 1:
            return cls()
        return cls(int(own["RANK"]), int(own["WORLD_SIZE"]), int(own.get("LOCAL_RANK", "0")),
                   own.get("MASTER_ADDR", "127.0.0.1"), int(own.get("MASTER_PORT", PORT)),
                   own.get(AGENT) == "True", own.get(ATTEMPT, "0"), own.get(REPORT))

    @property
    def follows(self) -> bool:
        """Whether another process goes through the stages, and this one takes part in some."""
        return self.rank > 0 or self.report is not None

    def device(self, given: str) -> str:
        """The device of this process, of those that `given` means on its machine."""
        return f"cuda:{self.local_rank}" if given == "cuda" and self.size > 1 else given


def _of_slurm(own: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, for a task of srun."""
    port = PORT + int(own.get("SLURM_JOB_ID", "0")) % PORTS
    return {"RANK": own["SLURM_PROCID"], "WORLD_SIZE": own["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": own.get("SLURM_LOCALID", "0"), "MASTER_PORT": str(port),
            "MASTER_ADDR": first_host(own.get("SLURM_STEP_NODELIST", "127.0.0.1"))}


def first_host(hosts: str) -> str:
    """The first of a list as Slurm writes it: node07 of `node[07-09,12],other`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,]*)", hosts)
    assert found, hosts
    return "".join(part for part in found.groups() if part)
