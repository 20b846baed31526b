"""DeepSpeed's ZeRO: the moments are spread over the processes (stage 1), the gradient as well (2), and the
weights (3). Needs the package deepspeed.

DeepSpeed takes the mean over processes; what it calls the scale of the loss makes the sum of it, divided by
the count. It clips inside its step, so that step is taken where the others clip; a gradient that is not
finite leaves the weights alone there. Given up: with stage 3 the first process holds all weights a second
time."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.architectures.base import Drafter
from trainer.errors import UserError
from trainer.records import Batch, Step
from trainer.strategies.base import MakeOptimizer, Moments, Placed, Strategy
from trainer.strategies.ddp import Found, Losses, several, step_of
from trainer.strategies.process import Group

BUCKET = 50_000_000  # elements that are summed at a time; two buffers of that size are held


class Zero(Strategy):
    by_parts = True

    def __init__(self, stage: Literal[1, 2, 3]) -> None:
        self.stage = stage

    def problem(self, processes: int) -> str | None:
        return several(processes)

    def preflight(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError(f"strategy=zero{self.stage} needs the package deepspeed, which is not installed; "
                            "install it (DS_BUILD_OPS=0 pip install deepspeed), or set strategy=fsdp2, which "
                            "shares as much")

    def place(self, drafter: Drafter, optimizer: MakeOptimizer, group: Group, rows: int) -> Placed:
        twin = copy.deepcopy(drafter) if group.main and self.stage == 3 else None
        module = Casting(drafter)
        engine = _engine(module, optimizer(params=drafter.parameters()), group, self.stage, rows)
        assert engine.zero_optimization_stage() == self.stage and engine.world_size == group.size
        return Spread(engine, drafter, group, self.stage, twin)


class Casting(Losses):
    """DeepSpeed turns off the autocast that it finds on an accelerator; here it is turned on inside."""

    def forward(self, batch: Batch, dtype: torch.dtype | None) -> Found:
        with torch.autocast(batch.taps.device.type, dtype=dtype, enabled=dtype is not None):
            return super().forward(batch)


def _engine(module: Casting, optimizer: torch.optim.Optimizer, group: Group, stage: int, rows: int) -> Any:
    if group.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update({"RANK": str(group.rank), "WORLD_SIZE": str(group.size)})  # it asks there again
    os.environ.setdefault("LOCAL_RANK", group.device.partition(":")[2] or "0")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without; it would be compiled
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    elements = sum(parameter.numel() for parameter in module.parameters())
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": rows,
                "zero_allow_untested_optimizer": True, "steps_per_print": None,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": min(BUCKET, elements + 1),
                                      "stage3_param_persistence_threshold": 0,
                                      "memory_efficient_linear": False}}  # true changes torch for everybody
    return deepspeed.initialize(model=module, optimizer=optimizer, config=settings)[0]


class Spread(Placed):
    """`twin` is the drafter in one piece, where the processes hold shares of its weights, on the first one
    alone."""

    def __init__(self, engine: Any, drafter: Drafter, group: Group, stage: int, twin: Drafter | None) -> None:
        super().__init__(drafter, engine.optimizer.optimizer, group)
        self.engine, self.stage, self.twin = engine, stage, twin
        self.last = True

    def loss(self, batch: Batch) -> Step:
        kind = batch.taps.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            return step_of(self.engine(batch, dtype))

    def row(self, last: bool) -> AbstractContextManager[None]:
        self.last = last
        return nullcontext()

    def backward(self, loss_sum: Tensor) -> None:
        self.engine.optimizer.override_loss_scale(1.0)
        self.engine.backward(loss_sum, scale_wrt_gas=False)
        if not self.last:
            self.engine.step()  # counts the row

    def clip(self, count: float, bound: float) -> float:
        inner = self.engine.optimizer
        inner.clip_grad = bound
        inner.override_loss_scale((count or 1.0) / self.group.size)
        self.engine.step()
        return math.inf if inner.overflow else float(self.engine.get_global_grad_norm())

    def step(self) -> None:
        """Was taken when the gradient was clipped."""

    @torch.no_grad()
    def whole(self) -> Drafter | None:
        if self.stage < 3:
            return self.drafter if self.group.main else None
        import deepspeed

        own = {} if self.twin is None else dict(self.twin.named_parameters())
        for name, parameter in self.drafter.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if own:
                    own[name].copy_(parameter)
        return self.twin

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        entry = next(iter(self.optimizer.state.values()), {})
        found: Moments = {}
        for index, parameter in self._trained():
            found[index] = {key: safe_get_full_optimizer_state(parameter, key) if _spread(value)
                            else torch.as_tensor(value) for key, value in entry.items()}
        return found

    def load_moments(self, moments: Moments) -> None:
        entry = next(iter(moments.values()), {})
        inner = self.engine.optimizer
        for flat in inner.fp32_partitioned_groups_flat if self.stage == 3 \
                else inner.single_partition_of_fp32_groups:
            self.optimizer.state[flat] = {key: torch.zeros_like(flat) if _spread(value) else value.clone()
                                          for key, value in entry.items()}
        if self.stage < 3:
            inner._lazy_init_hp_params_optimizer_state()  # else it is done behind the first step
        for index, parameter in self._trained():
            for key, value in moments.get(index, {}).items():
                if _spread(value):
                    self._load(parameter, key, value)

    def _load(self, parameter: Tensor, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        value = value.to(parameter.device)
        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        size = parameter.ds_tensor.numel()  # shares are filled up to the same size
        filled = F.pad(value.flatten(), (0, size * self.group.size - value.numel()))
        safe_set_local_optimizer_state(parameter, filled.chunk(self.group.size)[self.group.rank], key)

    def _trained(self) -> list[tuple[int, Any]]:
        """What has moments, by its number among all parameters."""
        return [(index, parameter) for index, parameter in enumerate(self.drafter.parameters())
                if parameter.requires_grad]


def _spread(value: Any) -> bool:
    """Whether an entry of an optimizer's state has the shape of the parameter; the others are numbers."""
    return isinstance(value, Tensor) and value.ndim > 0
