"""The processes that train together, as each of them sees them: the sums over all, and what the first one has
to tell. One that is alone has all of it already, and nothing is computed for it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from trainer.errors import UserError
from trainer.strategies import meeting
from trainer.strategies.world import World

# For a collective: while the first process measures acceptance the others wait. What has died is noticed by
# whoever started the processes.
TIMEOUT = timedelta(hours=6)
Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Group:
    """This process is number `rank` of `size` and computes on `device`."""

    rank: int
    size: int
    device: str

    @property
    def main(self) -> bool:
        """Whether this one measures, tells and writes."""
        return self.rank == 0

    def total(self, sums: Sums, tokens: int) -> tuple[Sums, int]:
        """Sums and counts by name, and tokens, added over all processes; each has the same names."""
        if self.size == 1:
            return sums, tokens
        names = sorted(sums)
        flat = torch.tensor([*(sums[name] for name in names), (tokens, 0)], dtype=torch.float64)
        distributed.all_reduce(flat)
        *rows, last = flat.tolist()
        return dict(zip(names, map(tuple, rows), strict=True)), int(last[0])

    def tell(self, value: Any) -> Any:
        """What the first process has for all of them."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, **facts: Any) -> None:
        """Raises UserError where a process has other facts than the first, which would train another drafter,
        or the device of another one."""
        if self.size == 1:
            return
        own = {**facts, "torch": torch.__version__, "device": self.device.partition(":")[0]}
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, (own, (platform.node(), self.device)))
        for rank, (each, place) in enumerate(found):
            for name, value in each.items():
                if value != (first := found[0][0][name]):
                    raise UserError(f"process {rank} of {self.size} has another {name} than the first one: "
                                    f"{value}, not {first}; start all of them with the same command, files "
                                    "and packages")
            if self.device != "cpu" and place in (others := [other for _, other in found[:rank]]):
                raise UserError(f"processes {others.index(place)} and {rank} both compute on {place[1]} of "
                                f"{place[0]}; start at most one for each device")


@contextmanager
def joined(world: World, device: str, processes: int) -> Iterator[Group]:
    """This process among the `processes` that were asked for, each on a `device` of its own."""
    if world.size != processes:
        raise UserError(f"hardware.processes={processes}, but {world.size} "
                        f"{'processes were' if world.size > 1 else 'process was'} started; set it to "
                        f"{world.size}, or start as many")
    own = world.device(device)
    if world.size == 1:
        yield Group(0, 1, own)
        return
    if own != "cpu":
        count = torch.cuda.device_count()
        if world.local_rank >= count:
            raise UserError(f"process {world.rank} is number {world.local_rank} on {platform.node()}, which "
                            f"has {count} CUDA or ROCm devices; start at most one for each device")
        torch.cuda.set_device(own)
    meeting.gather(world)
    backend = "gloo" if own == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.PrefixStore("group", meeting.store(world)),
                                   rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    try:
        if (found := distributed.get_world_size()) != processes:
            raise UserError(f"hardware.processes={processes}, but {found} have met")
        yield Group(world.rank, world.size, own)
    finally:
        distributed.destroy_process_group()
