"""Several trainings of one cache at the same time: each ends with the bits of one that is alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from forks import FORKS
from tiny import copied, finished_inputs
from trainings import SAMPLES, check_equal, run, stage

from trainer.hidden_states.offline import Offline, OfflineRuntime
from trainer.target import Target

WATCHFUL = partial(Offline, runtime=OfflineRuntime("always", 2))


def train(target: Target, inputs: dict[str, Path], out: Path, meeting: Any) -> None:
    torch.set_num_threads(1)
    meeting.wait(60)
    run(stage(target, source=WATCHFUL), inputs, out)


def test_two_processes_train_from_one_cache(tiny_target: Target, tmp_path: Path) -> None:
    target = copied(tiny_target, tmp_path / "target")
    inputs = finished_inputs(target, tmp_path / "inputs", SAMPLES, heldout=3)
    states = inputs["hidden_states"]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in states.iterdir()}
    meeting = FORKS.Barrier(2)
    trainers = [FORKS.Process(target=train, args=(target, inputs, tmp_path / name, meeting))
                for name in ("one", "two")]
    for process in trainers:
        process.start()
    run(stage(target), inputs, tmp_path / "alone")  # a third one, as likely as not
    for process in trainers:
        process.join(120)
    assert [process.exitcode for process in trainers] == [0, 0]
    for name in ("one", "two"):
        check_equal(tmp_path / "alone", tmp_path / name)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in states.iterdir()} == before
