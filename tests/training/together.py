"""Trainings of several processes, forked: most of what a small one costs is the import of torch."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forks import FORKS
from hydra.utils import get_class
from tiny import acceptance, make_small
from trainings import CONF, node, stage

from trainer.strategies import meeting
from trainer.strategies.base import Strategy
from trainer.strategies.process import joined
from trainer.strategies.world import World
from trainer.target import Target
from trainer.training.stage import Train, TrainRuntime


@dataclass(frozen=True)
class Job:
    """A training of the `drafter` of this name in the folder `out`, with these changes of settings, measured
    every so many steps; from step 3 of another folder, or from the beginning. All of it can be pickled."""

    out: Path
    changes: dict[str, Any]
    drafter: str = "dflash"
    measured: int | None = None
    begins: Path | None = None

    def made(self, target: Target, processes: int, name: str) -> Train:
        runtime = TrainRuntime("cpu", processes, strategy(name), checkpoint_every=3, keep_checkpoints=2,
                               log_every=2, wandb_project=None)
        changes = {name: value for name, value in self.changes.items() if name != "optimizer"}
        made = stage(target, runtime=runtime, acceptance=acceptance(every=self.measured),
                     drafter=make_small(self.drafter, anchors=16, layers=1), **changes)
        return replace(made, optimizer=self.changes.get("optimizer", made.optimizer))

    def prepare(self) -> None:
        self.out.mkdir()
        if self.begins is not None:
            shutil.copytree(self.begins / "checkpoints/step_000003", self.out / "checkpoints/step_000003")


def several_strategies() -> list[Any]:
    """The options for several processes; those of DeepSpeed only where that is installed."""
    absent = importlib.util.find_spec("deepspeed") is None
    return [pytest.param(name, marks=[pytest.mark.skipif(absent, reason="needs the package deepspeed")])
            if name.startswith("zero") else name
            for name in sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")) if name != "single"]


def strategy(name: str) -> Strategy:
    """The option of this name."""
    content = yaml.safe_load((CONF / f"strategy/{name}.yaml").read_text())
    return get_class(content["_target_"])(**node("strategy", name))


def alone(target: Target, inputs: dict[str, Path], job: Job) -> dict[str, Any]:
    """Trains in this process; the record."""
    job.prepare()
    return job.made(target, 1, "single").run(inputs, job.out)


def together(processes: int, name: str, target: Target, inputs: dict[str, Path], *jobs: Job) -> None:
    """Trains one job after the other in `processes` processes, by the strategy of this `name`."""
    for job in jobs:
        assert not job.out.exists()
    store = meeting.host()
    forks = [FORKS.Process(target=_train, args=(World(rank, processes, rank, "127.0.0.1", store.port, True),
                                                name, target, inputs, jobs)) for rank in range(processes)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(300)
        fork.kill()
    assert [fork.exitcode for fork in forks] == [0] * processes


def _train(world: World, name: str, target: Target, inputs: dict[str, Path], jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    with joined(world, "cpu", world.size) as group:
        for job in jobs:
            if group.main:
                job.prepare()
            job.made(target, world.size, name).train(inputs, job.out, group)
