"""Stages that several processes run together.

One process goes through all stages. Where it comes to one of these, it starts the others and hands over its
command line; or they are there already, from torchrun or Slurm, and wait for it. They compose the same
configuration, and must come to the same fingerprint."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer import _folders
from trainer.errors import UserError
from trainer.strategies import meeting
from trainer.strategies.launch import launch
from trainer.strategies.world import World

RECORD = "record.json"  # of a stage that was run by processes that were launched, until its owner has read it
Run = Callable[[dict[str, Path], Path], dict[str, Any]]


class Task(Protocol):
    """A planned stage, as this file needs it."""

    name: str
    fingerprint: str

    @property
    def partial(self) -> Path: ...


def meet(world: World, asked: int) -> None:
    """Raises unless as many processes were started from outside as the stages ask for, and they can meet."""
    if world.size not in (1, asked):
        raise UserError(f"{world.size} processes were started, but hardware.processes={asked}; set it to "
                        f"{world.size}, or give the command once")
    if world.size > 1:
        meeting.store(world)


def run(task: Task, stage_run: Run, processes: int, inputs: dict[str, Path], out: Path,
        arguments: Sequence[str]) -> dict[str, Any]:
    """What the stage of `task` says when all of its processes have run it; `arguments` are those of the
    command line."""
    world = World.here()
    if processes == 1:
        return stage_run(inputs, out)
    if world.size > 1:
        meeting.begin(meeting.store(world), task.fingerprint)
        return stage_run(inputs, out)
    (out / RECORD).unlink(missing_ok=True)
    launch([sys.executable, "-m", "trainer", *arguments], processes, task.fingerprint)
    record = _folders.read_sealed(out / RECORD)
    (out / RECORD).unlink()
    return record


def take_part(tasks: Mapping[str, tuple[Task, Run, dict[str, Path]]], world: World) -> None:
    """In a process that follows another one: runs what that begins, of these tasks by their fingerprint."""
    begun = meeting.awaited(world)
    if not begun:
        return
    if begun not in tasks:
        raise UserError(f"process {world.rank} of {world.size} comes to other settings or files than the "
                        "first one; start all of them with the same command, and let them see the same files")
    task, stage_run, inputs = tasks[begun]
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if world.rank:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        record = stage_run(inputs, task.partial.resolve())
    if world.rank == 0:
        _folders.write_sealed(task.partial / RECORD, record)


def over(world: World) -> None:
    """Lets those go that wait for something to take part in, where nothing more will come."""
    if world.size > 1:
        meeting.begin(meeting.store(world), "")
