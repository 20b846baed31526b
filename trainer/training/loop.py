"""The loop. It knows no drafter and no layout: it asks for sums and counts, of all processes that train, and
divides once by the global count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.architectures.base import Drafter
from trainer.errors import UserError
from trainer.records import Batch, Step
from trainer.strategies.base import Placed
from trainer.training.schedule import warmup_cosine


@dataclass(frozen=True)
class Pace:
    """How a run goes: `steps` optimizer steps of `accumulate` rows of this process, warm-up, final share of
    the rate."""

    steps: int
    accumulate: int
    warmup: float
    floor: float
    clip: float
    precision: Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Taken:
    """One optimizer step: its number (1-based), the numbers of its rows on all processes, the norm of its
    gradient. `fault` says what is wrong with the weights that the last one left."""

    step: int
    totals: dict[str, tuple[float, float]]
    tokens: int
    grad_norm: float
    lr: float
    fault: str | None = None


def fit(placed: Placed, row: Callable[[int], Batch], pace: Pace, start: int) -> Iterator[Taken]:
    """Takes the steps after `start`, yielding after each one; between them the caller saves and logs. `row`
    gives the rows of this process by its own count."""
    optimizer = placed.optimizer
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(start, pace.steps):
        factor = warmup_cosine(step, pace.steps, pace.warmup, pace.floor)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        totals: dict[str, tuple[float, float]] = {}
        tokens = 0
        for part in range(pace.accumulate):
            batch = row(step * pace.accumulate + part)
            with placed.row(last=part + 1 == pace.accumulate):
                result = forward(placed, batch, pace.precision)
                placed.backward(result.loss_sum)
            tokens += int((batch.document >= 0).sum())
            add(totals, result)
        totals, tokens = placed.group.total(totals, tokens)
        loss, count = totals["loss"]
        norm = placed.clip(count, pace.clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise UserError(f"the loss ({loss:.6g}) or its gradient ({norm:.6g}) is not finite at step "
                            f"{step + 1}; lower optimizer.lr, or look at the rows of this step (seed and "
                            "step name them); the last checkpoint is kept")
        placed.step()
        fault = _fault(placed, batch, pace.precision) if step + 1 == pace.steps else None
        yield Taken(step + 1, totals, tokens, norm, peaks[0] * factor, fault)
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak


@torch.no_grad()
def _fault(placed: Placed, batch: Batch, precision: str) -> str | None:
    """For people: what a step left that is not finite, which otherwise the next step tells; None when nothing
    is. Finite weights may be so large that what they compute is not: a row is looked at, too."""
    drafter = placed.whole()
    return placed.group.tell(None if drafter is None else _faulty(drafter, batch, precision))


def _faulty(drafter: Drafter, batch: Batch, precision: str) -> str | None:
    found = [name for name, parameter in drafter.named_parameters() if not parameter.isfinite().all()]
    with torch.compiler.set_stance("force_eager"):  # a single row is not worth a compilation
        loss = float(forward(drafter, batch, precision).loss_sum)
    if not found and math.isfinite(loss):
        return None
    said = f"{len(found)} tensors ({', '.join(found[:3])}) are" if found else f"the loss ({loss:.6g}) is"
    return (f"{said} not finite after the last step; lower optimizer.lr, or optimizer.weight_decay where it "
            "is large; the last checkpoint is kept")


def forward(drafter: Drafter | Placed, batch: Batch, precision: str) -> Step:
    """`precision` names the autocast dtype; float32 turns autocast off."""
    kind = batch.taps.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        return drafter.loss(batch)


def add(totals: dict[str, tuple[float, float]], step: Step) -> None:
    """Adds the sums and counts of one row to `totals`."""
    figures = {"loss": (step.loss_sum, step.count)}
    figures |= {name: (ratio.total, ratio.count) for name, ratio in step.ratios.items()}
    for name, (total, count) in figures.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + float(total.detach()), before[1] + float(count.detach()))


def means(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in totals.items() if count}
