"""The promise of a strategy: how drafter and optimizer are laid out over the processes that train together.

Every layout computes the same: the gradient of a step is the sum over all of its rows, divided once by the
count of all; it is clipped by the norm of the whole. Weights are float32 masters in each. """

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from trainer.architectures.base import Drafter
from trainer.ranges import Gives
from trainer.records import Batch, Step
from trainer.strategies.process import Group

# The optimizer's YAML node, waiting for the parameters.
MakeOptimizer = Annotated[Callable[..., torch.optim.Optimizer], Gives(("params",))]
# State of the optimizer by the number that its `state_dict` gives a parameter, and by key: whole tensors in
# the shape of the parameter, or numbers.
Moments = dict[int, dict[str, Tensor]]


class Placed(ABC):
    """A drafter that is trained, and its optimizer, whose rates the loop sets. All processes call the same
    methods in the same order."""

    def __init__(self, drafter: Drafter, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self.drafter, self.optimizer, self.group = drafter, optimizer, group

    @abstractmethod
    def loss(self, batch: Batch) -> Step:
        """Sums and counts of a row of this process."""

    @abstractmethod
    def row(self, last: bool) -> AbstractContextManager[None]:
        """Around `loss` and `backward` of one row; behind the `last` of a step its gradient is complete."""

    @abstractmethod
    def backward(self, loss_sum: Tensor) -> None:
        """Adds the gradient of a row to that of the step."""

    @abstractmethod
    def clip(self, count: float, bound: float) -> float:
        """Divides the gradient of the step by `count`, unless that is 0, and clips it to the norm `bound`;
        the norm that it had."""

    @abstractmethod
    def step(self) -> None:
        """Moves the weights, and forgets the gradient."""

    @abstractmethod
    def whole(self) -> Drafter | None:
        """The drafter with all its weights, for use and not for training, on the first process, always the
        same object; None on the others."""

    def moments(self) -> Moments:
        """State of the optimizer, whole, on the first process; {} may be on the others."""
        return {index: {key: value if isinstance(value, Tensor) else torch.tensor(value)
                        for key, value in entry.items()}
                for index, entry in self.optimizer.state_dict()["state"].items()}

    def load_moments(self, moments: Moments) -> None:
        """Takes back what `moments` gave, in any layout; every process has all of it."""
        self.optimizer.load_state_dict({"state": moments,
                                        "param_groups": self.optimizer.state_dict()["param_groups"]})


class Strategy(ABC):
    by_parts: ClassVar[bool] = False  # whether the optimizer gets parts of tensors instead of whole ones

    @abstractmethod
    def problem(self, processes: int) -> str | None:
        """Why so many processes cannot train by it; for people, None when they can."""

    def preflight(self) -> None:
        """Raises UserError unless what it needs on this machine is there."""
        return

    @abstractmethod
    def place(self, drafter: Drafter, optimizer: MakeOptimizer, group: Group, rows: int) -> Placed:
        """Lays out a drafter that is on the device of the group and has the weights to begin with, the same
        in every process; `rows` of each make a step. What came about is checked, not only asked for."""
