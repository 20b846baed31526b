"""Stage `train`: samples and their hidden states -> `weights.safetensors`, going on from the newest
checkpoint. The weights are those of the step whose measured acceptance was highest, or of the last step where
none is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from safetensors.torch import save_file

from trainer.data.packing import require_fit
from trainer.data.responses import read_samples
from trainer.errors import UserError
from trainer.hidden_states.base import MakeSource, Manifest
from trainer.pipeline import Stage
from trainer.ranges import AtMost, Count, Device, Positive, Seed, SequenceLength, Share, require_device
from trainer.records import Sample, stored
from trainer.strategies.base import MakeOptimizer, Strategy
from trainer.strategies.process import Group, joined
from trainer.strategies.world import World
from trainer.target import Target
from trainer.training import checkpoint
from trainer.training.build import (
    MakeDrafter,
    count_by_category,
    first_drafter,
    mark_facts,
    require_buildable,
    require_start,
    require_unused_mask,
    save_counts,
    start_facts,
)
from trainer.training.course import Course
from trainer.training.log import require_wandb
from trainer.training.measuring import Measuring
from trainer.training.optimizers import require_parts, require_step


@dataclass(frozen=True)
class TrainRuntime:
    """Where training runs, in how many processes and by which strategy, and after how many steps it saves and
    logs; nothing that changes the result, but for the order in which sums are rounded."""

    device: Device
    processes: Count
    strategy: Strategy
    checkpoint_every: Count
    keep_checkpoints: Count
    log_every: Count
    wandb_project: str | None


@dataclass(frozen=True)
class Train(Stage):
    """`tokens` is the length of a packed row, `accumulate` rows make a step (of all processes together),
    `steps` (null: from `epochs`) end the run. `heldout_every` steps the loss of the held-out samples is
    measured, when `acceptance` says so what real decoding accepts, also before the first step."""

    target: Target
    drafter: MakeDrafter
    optimizer: MakeOptimizer
    source: MakeSource
    epochs: Count
    steps: Count | None
    tokens: Annotated[SequenceLength, AtMost(1 << 20)]
    accumulate: Count
    warmup: Share
    floor: Share
    clip: Positive
    precision: Literal["bfloat16", "float32"]
    compile: bool
    heldout_every: Count
    acceptance: Measuring
    seed: Seed
    runtime: TrainRuntime

    after: ClassVar[tuple[str, ...]] = ("responses", "hidden_states")
    version: ClassVar[int] = 3
    neutral: ClassVar[Mapping[str, Any]] = {"acceptance.weights": {}}
    sized: ClassVar[tuple[str, ...]] = ("checkpoints/*",)

    @property
    def processes(self) -> int:
        return self.runtime.processes

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        rows = self.drafter.func.fits_rows(self.tokens, self.target.max_length, **self.drafter.keywords)
        found = {"drafter": {**rows, **self.drafter.func.check(**self.drafter.keywords)},
                 "acceptance": self.acceptance.check(self.drafter)}
        problems = {f"train.{part}.{name}": text
                    for part, each in found.items() for name, text in each.items()}
        taps, last = self.drafter.func.reads(**self.drafter.keywords)
        states = stages["hidden_states"]
        if missing := sorted({*stored(taps)} - {*states.tap_layers}):
            problems["train.drafter.tap_layers"] = (
                f"must be among hidden_states.tap_layers {list(states.tap_layers)}, but {missing} "
                f"{'is' if len(missing) == 1 else 'are'} not; set target.tap_layers, which sets both")
        others = [str(tap) for tap in taps if not isinstance(tap, int)]
        if others and not (self.source.func.every_tap and states.engine.every_tap):
            problems["hidden_states"] = (f"must be in_process, since the drafter reads {', '.join(others)}, "
                                         "which the target gives in this process alone: no folder holds "
                                         "them, and no vLLM server hands them out")
        if last and states.last_rows == "none":
            problems["hidden_states.last_rows"] = ("must be supervised or all, since the drafter's loss "
                                                   "reads the target's last state, but is none")
        return problems | self._layout_problems()

    def _layout_problems(self) -> dict[str, str]:
        problem = self.runtime.strategy.problem(self.processes)
        problems = {} if problem is None else {"train.runtime.strategy": problem}
        if self.accumulate % self.processes:
            problems["train.accumulate"] = ("must be a multiple of hardware.processes="
                                            f"{self.processes}, which share the rows of a step, but is "
                                            f"{self.accumulate}")
        if self.processes > 1 and not self.source.func.shared:
            problems["hidden_states"] = ("must be offline with several processes, since each of them reads "
                                         "states, and only stored ones can be read by several")
        return problems

    def remarks(self, stages: Mapping[str, Any]) -> list[str]:
        return [] if self.steps is None else [
            f"train.steps={self.steps} says how long training is; train.epochs={self.epochs} does nothing"]

    def external(self) -> dict[str, Any]:
        return {**self.target.facts, **start_facts(self.drafter), **mark_facts(self.drafter, self.target)}

    def preflight(self) -> None:
        device, alone = self.runtime.device, World.here().size == 1
        last = World(rank=self.processes - 1, size=self.processes, local_rank=self.processes - 1)
        require_device(last.device(device) if alone else device, "train.runtime.device")
        self.acceptance.preflight()
        require_buildable(self.drafter, self.target, self.runtime.device)
        require_start(self.drafter, self.target)
        require_step(self.optimizer, self.runtime.device, self.clip)
        self.runtime.strategy.preflight()
        if self.runtime.strategy.by_parts:
            require_parts(self.optimizer, self.runtime.device)
        if self.runtime.wandb_project:
            require_wandb(self.runtime.wandb_project)

    def foresee(self, inputs: dict[str, Path]) -> None:
        if "responses" in inputs:
            self._samples(inputs["responses"])

    def _samples(self, responses: Path) -> tuple[list[Sample], list[Sample], int]:
        """Those to train on, those held out, and how many training samples are left out; all fit in a row."""
        answered = read_samples(responses, "train")
        samples = _trainable(answered)
        heldout = _trainable(read_samples(responses, "heldout"), required=False)
        self.acceptance.require(heldout)
        require_fit(samples + heldout, self.tokens)
        if len(samples) < self.processes:
            raise UserError(f"hardware.processes={self.processes} is more than the {len(samples)} samples to "
                            "train on; lower it, or give more prompts")
        require_unused_mask(self.target, samples)
        return samples, heldout, len(answered) - len(samples)

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        with joined(World.here(), self.runtime.device, self.processes) as group:
            return self.train(inputs, out, group)

    def train(self, inputs: dict[str, Path], out: Path, group: Group) -> dict[str, Any]:
        """`run`, in one of the processes of a group; only the first one has a record."""
        samples, heldout, left_out = self._samples(inputs["responses"])
        by_category = count_by_category(samples, self.target.config["vocab_size"])
        counts = torch.stack([*by_category.values()]).sum(0)
        drafter, facts = first_drafter(self.drafter, self.target, counts, by_category)
        drafter = drafter.to(group.device)
        states = inputs["hidden_states"]
        Manifest.read(states).require(states, layers=stored(drafter.tap_layers), last=drafter.needs_last,
                                      target=self.target.identity, template=self.target.template_hash)
        source = self.source(folder=states, layers=drafter.tap_layers)
        try:
            record, trained = Course(self, group, drafter, samples, heldout, source, out).run()
        finally:
            source.close()
        if trained is None:
            return {}
        save_counts(out, counts)
        save_file(checkpoint.trained(trained), out / "weights.safetensors")
        return {**record, **facts, "samples": len(samples), "left_out": left_out,
                "supervised": int(counts.sum()), "max_k": trained.max_k,
                "parameters": sum(parameter.numel() for parameter in trained.parameters())}


def _trainable(samples: list[Sample], required: bool = True) -> list[Sample]:
    """Samples with at least two sampled tokens: a block needs an anchor and something to predict."""
    kept = [sample for sample in samples if sample.supervised >= 2]
    if required and not kept:
        raise UserError(f"none of the {len(samples)} training samples has two supervised tokens, so there is "
                        "nothing to learn; look at the answers in the responses stage")
    return kept
