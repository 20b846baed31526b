"""Every process holds a share of weights, gradient and moments; the weights are put together for each pass,
all at once, as a drafter is small beside its target. Given up: the first process holds all weights a second
time, for measuring and saving."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.architectures.base import Drafter
from trainer.strategies.base import MakeOptimizer, Moments, Placed, Strategy
from trainer.strategies.ddp import several
from trainer.strategies.process import Group
from trainer.strategies.single import Alone


class Fsdp2(Strategy):
    by_parts = True

    def problem(self, processes: int) -> str | None:
        return several(processes)

    def place(self, drafter: Drafter, optimizer: MakeOptimizer, group: Group, rows: int) -> Placed:
        mesh = init_device_mesh(group.device.partition(":")[0], (group.size,))
        twin = copy.deepcopy(drafter) if group.main else None
        sharded = fully_shard(drafter, mesh=mesh)
        # a sum in place of the mean over processes, which knows nothing of how much each of them counted;
        # gloo has no other reduction that divides on its own
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        assert all(isinstance(each, DTensor) and each.device_mesh.size() == group.size
                   for each in drafter.parameters())
        return Sharded(drafter, optimizer(params=drafter.parameters()), group, twin)


class Sharded(Alone):
    """`twin` is the drafter in one piece, on the first process alone."""

    def __init__(self, drafter: Drafter, optimizer: torch.optim.Optimizer, group: Group,
                 twin: Drafter | None) -> None:
        super().__init__(drafter, optimizer, group)
        self.twin = twin

    def row(self, last: bool) -> AbstractContextManager[None]:
        self.drafter.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def norm(self, given: Tensor) -> float:
        assert isinstance(given, DTensor)
        return float(given.full_tensor())

    @torch.no_grad()
    def whole(self) -> Drafter | None:
        own = {} if self.twin is None else dict(self.twin.named_parameters())
        for name, parameter in self.drafter.named_parameters():
            assert isinstance(parameter, DTensor)
            value = parameter.full_tensor()
            if own:
                own[name].copy_(value)
        return self.twin

    def moments(self) -> Moments:
        return {index: {key: value.full_tensor() if isinstance(value, DTensor) else value
                        for key, value in entry.items()} for index, entry in super().moments().items()}

    def load_moments(self, moments: Moments) -> None:
        parameters = list(self.drafter.parameters())
        super().load_moments({index: {key: _share(value, parameters[index]) for key, value in entry.items()}
                              for index, entry in moments.items()})


def _share(value: Tensor, parameter: Tensor) -> Tensor:
    """What this process keeps of a moment; numbers are kept as they are."""
    assert isinstance(parameter, DTensor)
    if value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements,
                             src_data_rank=None)
