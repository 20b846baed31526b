"""The promise of what measures acceptance while a drafter is trained. Training chooses its best weights by it
and knows no more of it: decoding is the business of `evaluate`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.architectures.base import Drafter
from trainer.gates import Gate
from trainer.records import HiddenStates, Sample
from trainer.target import Target
from trainer.training.build import MakeDrafter

SHOWN = ("measured", "estimate_walk", "gap", "train_walk")  # beside the progress of a run
SLICE = "measured/"  # of a part of the prompts, in the log
OVERFIT = 0.1  # how much better known samples may do than held-out ones, beyond the standard error


@dataclass(frozen=True)
class Measured:
    """Accepted lengths of one moment of training.

    `measured`: real decoding of held-out prompts from the exported folder. `estimate_walk`: the trainer's own
    weights and stored states along the same answers; `gap` is measured / estimate_walk - 1. `heldout_walk`
    and `train_walk`: along stored answers, of samples held out and trained on; `overfit` is train_walk /
    heldout_walk - 1. Errors are standard errors over prompts, None for a single one, of which no gate can
    judge the gap. `slices` are measured lengths of parts of the prompts by name, `mix` is that of the user's
    own mix of them, None where none was given. """

    measured: float
    estimate_walk: float
    gap: float
    gap_error: float | None
    heldout_walk: float
    train_walk: float
    overfit: float
    overfit_error: float | None
    prompts: int
    gates: list[Gate]
    slices: dict[str, float] = field(default_factory=dict)
    mix: float | None = None

    @property
    def overfits(self) -> bool:
        return self.overfit_error is not None and self.overfit > max(OVERFIT, 2 * self.overfit_error)

    def figures(self) -> dict[str, Any]:
        """For a line of the log."""
        named = {name: getattr(self, name) for name in (*SHOWN, "gap_error", "heldout_walk", "mix")}
        named |= {SLICE + name: length for name, length in self.slices.items()}
        found = {name: round(value, 5) for name, value in named.items() if value is not None}
        return found | ({"overfits": True} if self.overfits else {})

    def line(self) -> str:
        """For people."""
        error = "" if self.gap_error is None else f" ± {self.gap_error:.1%}"
        said = (f"measured {self.measured:.3f} on {self.prompts} held-out prompts, estimate_walk "
                f"{self.estimate_walk:.3f}, gap {self.gap:+.1%}{error}; stored answers: train_walk "
                f"{self.train_walk:.3f}, heldout_walk {self.heldout_walk:.3f}")
        if self.slices:
            said += "; by slice: " + ", ".join(f"{name} {length:.2f}" for name, length in self.slices.items())
        if self.mix is not None:
            said += f"; mix {self.mix:.3f}"
        if not all(gate.passed for gate in self.gates):
            return f"{said}: not served as trained"
        return f"{said}: overfitting" if self.overfits else said


class Measuring(ABC):
    @abstractmethod
    def check(self, make: MakeDrafter) -> dict[str, str]:
        """By setting what is wrong with those of its own. Cheap."""

    @abstractmethod
    def preflight(self) -> None:
        """Raises UserError unless what it needs on this machine is there."""

    @abstractmethod
    def due(self, step: int, steps: int) -> bool:
        """Whether to measure after `step` of `steps`; False throughout when it is turned off."""

    @abstractmethod
    def usable(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those of `samples` that it would take."""

    def require(self, heldout: Sequence[Sample]) -> None:
        """Raises UserError where it asks for held-out samples that are not there. Cheap."""
        return

    @abstractmethod
    def measure(self, drafter: Drafter, target: Target, heldout: Sequence[Sample],
                training: Sequence[Sample], states: Callable[[Sample], HiddenStates],
                folder: Path) -> Measured:
        """Takes some of the samples, the same each time, and leaves the drafter and all randomness as they
        are. `states` gives what training reads; `folder` is its own while it runs."""


@dataclass
class Measurements:
    """Those of one run; `best` is its best step so far, {"step": ..., "measured": ...} and the "mix" by which
    it was chosen, where there is one; None before the first. `gates` are those of the newest as JSON by name.

    What was there before the first step is measured as well and never the best: with as few prompts a
    difference to it is mostly chance, and whoever trains asked for trained weights. A run that does no better
    says so. Nor is its gap judged: a fresh drafter's logits lie so close together that rounding alone may
    change what it drafts."""

    measuring: Measuring
    drafter: Drafter
    target: Target
    heldout: list[Sample]
    training: list[Sample]
    states: Callable[[Sample], HiddenStates]
    folder: Path
    best: dict[str, Any] | None
    gates: dict[str, Any]

    def due(self, step: int, steps: int) -> bool:
        return bool(self.heldout) and self.measuring.due(step, steps)

    def begin(self, step: int, steps: int) -> Measured | None:
        """Before the first step, what the drafter accepts as it is, so that what fails does so now; None
        where a run goes on after `step`, or nothing is measured."""
        if step:
            return None
        if self.due(steps, steps):
            return self._measure("before the first step")
        if self.measuring.due(steps, steps):
            print("train: there is no held-out sample, or none that leaves room for an answer, so acceptance "
                  "is not measured, and the last step counts as the best", flush=True)
        return None

    def take(self, step: int) -> Measured:
        found = self._measure(f"step {step}")
        figures = found.figures()
        if self.best is None or chosen_by(figures) >= chosen_by(self.best):
            kept = {name: figures[name] for name in ("measured", "mix") if name in figures}
            self.best = {"step": step, **kept}
        return found

    def _measure(self, moment: str) -> Measured:
        began = time.perf_counter()
        found = self.measuring.measure(self.drafter, self.target, self.heldout, self.training, self.states,
                                       self.folder)
        print(f"train: {moment}, {found.line()} (in {time.perf_counter() - began:.1f} s)", flush=True)
        return found


def chosen_by(figures: Mapping[str, Any]) -> float:
    """The accepted length that makes a step the best one: of the user's own mix, or of all prompts."""
    return figures.get("mix", figures["measured"])
