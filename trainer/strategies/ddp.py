"""Every process holds all of the drafter; the gradients are summed while the backward pass goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.architectures.base import Drafter
from trainer.records import Batch, Ratio, Step
from trainer.strategies.base import MakeOptimizer, Placed, Strategy
from trainer.strategies.process import Group
from trainer.strategies.single import Alone


class Ddp(Strategy):
    def problem(self, processes: int) -> str | None:
        return several(processes)

    def place(self, drafter: Drafter, optimizer: MakeOptimizer, group: Group, rows: int) -> Placed:
        placed = Replicated(drafter, optimizer(params=drafter.parameters()), group)
        assert placed.module.process_group.size() == group.size
        return placed


def several(processes: int) -> str | None:
    return None if processes > 1 else "must be single with hardware.processes=1, which shares nothing"


Found = tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]


class Losses(nn.Module):
    """The drafter as a module whose forward pass is the loss: that is what libraries wrap. They look for
    tensors in tuples and dicts, and not in records."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch) -> Found:
        step = self.drafter.loss(batch)
        return step.loss_sum, step.count, {name: (ratio.total, ratio.count)
                                           for name, ratio in step.ratios.items()}


def step_of(found: Found) -> Step:
    """The record again."""
    loss_sum, count, ratios = found
    return Step(loss_sum, count, {name: Ratio(*each) for name, each in ratios.items()})


class Replicated(Alone):
    def __init__(self, drafter: Drafter, optimizer: torch.optim.Optimizer, group: Group) -> None:
        super().__init__(drafter, optimizer, group)
        # a row may leave parameters out, another one on another process not
        self.module = DistributedDataParallel(Losses(drafter), find_unused_parameters=True,
                                              broadcast_buffers=False, gradient_as_bucket_view=True)
        self.module.register_comm_hook(None, lambda _, bucket: _sum(bucket))

    def loss(self, batch: Batch) -> Step:
        return step_of(self.module(batch))

    def row(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.module.no_sync()

    def whole(self) -> Drafter | None:
        return self.drafter if self.group.main else None


def _sum(bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """In place of the mean over processes, which knows nothing of how much each of them counted."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
