"""One process that trains alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainer.architectures.base import Drafter
from trainer.records import Batch, Step
from trainer.strategies.base import MakeOptimizer, Placed, Strategy
from trainer.strategies.process import Group


class Single(Strategy):
    def problem(self, processes: int) -> str | None:
        return None if processes == 1 else (f"must be another one than single with hardware.processes="
                                            f"{processes}: ddp, or one that spreads weights and moments")

    def place(self, drafter: Drafter, optimizer: MakeOptimizer, group: Group, rows: int) -> Placed:
        return Alone(drafter, optimizer(params=drafter.parameters()), group)


class Alone(Placed):
    def loss(self, batch: Batch) -> Step:
        return self.drafter.loss(batch)

    def row(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss_sum: Tensor) -> None:
        loss_sum.backward()

    def clip(self, count: float, bound: float) -> float:
        parameters = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is not None and count:
                parameter.grad.div_(count)
        return self.norm(torch.nn.utils.clip_grad_norm_(parameters, bound))

    def norm(self, given: Tensor) -> float:
        """The number that a norm of the gradient is."""
        return float(given)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> Drafter | None:
        return self.drafter
