"""Stage `train`: samples and their hidden states -> `weights.safetensors`, going on from the newest
checkpoint. The weights are those of the step whose measured acceptance was highest, or of the last step where
none is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from safetensors.torch import save_file

from trainer.architectures.base import Drafter
from trainer.data.packing import require_fit
from trainer.data.responses import read_samples
from trainer.errors import UserError
from trainer.gates import require
from trainer.hidden_states.base import HiddenStateSource, MakeSource, Manifest
from trainer.hidden_states.prefetch import Prefetch
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import AtMost, Count, Device, Gives, Positive, Seed, SequenceLength, Share, require_device
from trainer.records import Sample, stored
from trainer.target import Target
from trainer.training import checkpoint, monitors
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
from trainer.training.log import Log, require_wandb
from trainer.training.loop import Pace, Taken, add, fit, forward, means
from trainer.training.measuring import SHOWN, Measurements, Measuring
from trainer.training.optimizers import require_step
from trainer.training.rows import Rows
from trainer.training.watch import Watch


@dataclass(frozen=True)
class TrainRuntime:
    """Where training runs, and after how many steps it saves and logs; nothing that changes the result."""

    device: Device
    checkpoint_every: Count
    keep_checkpoints: Count
    log_every: Count
    wandb_project: str | None


@dataclass(frozen=True)
class Train(Stage):
    """`tokens` is the length of a packed row, `accumulate` rows make a step, `steps` (null: from `epochs`)
    end the run. `heldout_every` steps the loss of the held-out samples is measured, when `acceptance` says so
    what real decoding accepts, also before the first step."""

    target: Target
    drafter: MakeDrafter
    optimizer: Annotated[Callable[..., torch.optim.Optimizer], Gives(("params",))]
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
        return problems

    def remarks(self, stages: Mapping[str, Any]) -> list[str]:
        return [] if self.steps is None else [
            f"train.steps={self.steps} says how long training is; train.epochs={self.epochs} does nothing"]

    def external(self) -> dict[str, Any]:
        return {**self.target.facts, **start_facts(self.drafter), **mark_facts(self.drafter, self.target)}

    def preflight(self) -> None:
        require_device(self.runtime.device, "train.runtime.device")
        self.acceptance.preflight()
        require_buildable(self.drafter, self.target, self.runtime.device)
        require_start(self.drafter, self.target)
        require_step(self.optimizer, self.runtime.device, self.clip)
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
        require_unused_mask(self.target, samples)
        return samples, heldout, len(answered) - len(samples)

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        samples, heldout, left_out = self._samples(inputs["responses"])
        by_category = count_by_category(samples, self.target.config["vocab_size"])
        counts = torch.stack([*by_category.values()]).sum(0)
        drafter, facts = first_drafter(self.drafter, self.target, counts, by_category)
        drafter = drafter.to(self.runtime.device)
        states = inputs["hidden_states"]
        Manifest.read(states).require(states, layers=stored(drafter.tap_layers), last=drafter.needs_last,
                                      target=self.target.identity, template=self.target.template_hash)
        source = self.source(folder=states, layers=drafter.tap_layers)
        try:
            record = self._train(drafter, samples, heldout, source, out)
        finally:
            source.close()
        save_counts(out, counts)
        save_file(checkpoint.trained(drafter), out / "weights.safetensors")
        return {**record, **facts, "samples": len(samples), "left_out": left_out,
                "supervised": int(counts.sum()), "max_k": drafter.max_k,
                "parameters": sum(parameter.numel() for parameter in drafter.parameters())}

    def _train(self, drafter: Drafter, samples: list[Sample], heldout: list[Sample],
               source: HiddenStateSource, out: Path) -> dict[str, Any]:
        rows = Rows(samples, source, self.tokens, self.seed, self.runtime.device)
        if self.compile:
            drafter.compile(dynamic=False)
        steps = self._steps(rows)
        optimizer = self.optimizer(params=drafter.parameters())
        watched = monitors.Monitors(drafter)
        position = _position(out / "checkpoints", drafter, optimizer, steps)
        accepted = Measurements(self.acceptance, drafter, self.target, self.acceptance.usable(heldout),
                                self.acceptance.usable(samples), source.get, out / "measured",
                                position["best"], position["gates"])
        log, watch = Log(out / "log.jsonl", position["log"], self.runtime.wandb_project), Watch(position)
        pace = Pace(steps, self.accumulate, self.warmup, self.floor, self.clip, self.precision)
        sums: dict[str, tuple[float, float]] = position["sums"]  # since the last line of the log
        step, told = position["step"], True  # `told`: all that is due after this step was done

        def save() -> None:
            checkpoint.save(out / "checkpoints", step, drafter, optimizer,
                            {"tokens": watch.tokens, "seconds": watch.seconds, "sums": sums,
                             "log": log.lines, "best": accepted.best, "gates": accepted.gates},
                            self.runtime.keep_checkpoints)

        self._begin(accepted, source, step, steps, log)
        with Progress("train", total=steps, unit="steps", start=step, warm_up=True) as bar, \
                closing(Prefetch(rows.row, source.ahead, steps * self.accumulate)) as ready, source.in_use():
            try:
                for taken in fit(drafter, optimizer, ready.get, pace, step):
                    step, told = taken.step, False
                    if taken.fault:
                        raise UserError(taken.fault)
                    watch.took(taken.tokens)
                    _merge(sums, taken.totals)
                    bar.advance(1, loss=_share(taken, "loss"), accepted=_share(taken, "accepted_length"),
                                lr=taken.lr, **{"tokens/s": watch.rate})
                    measured = accepted.take(step) if accepted.due(step, steps) else None
                    due = step == steps or step % self.heldout_every == 0
                    if due or measured or step % self.runtime.log_every == 0:
                        found = self._heldout(drafter, heldout, source) if due else {}
                        found |= watched.watch(step, step == steps, sums, log.lines)
                        found |= measured.figures() if measured else {}
                        log.write(_line(taken, means(sums), watch) | found)
                        sums = {}
                    if measured:
                        bar.advance(0, **{name: measured.figures()[name] for name in SHOWN})
                        accepted.gates = require(measured.gates)
                    told = True
                    if step == steps or measured or step % self.runtime.checkpoint_every == 0:
                        save()
            except UserError:
                if told and step > position["step"]:
                    save()  # the row that could not be had took no part in what was learnt so far
                raise
        log.close()
        best = _take_best(drafter, accepted, steps, out / "checkpoints", log.lines[0])
        return {"steps": steps, "tokens": watch.tokens, "train_seconds": round(watch.seconds, 1), **best,
                **monitors.record(log.lines), "gates": accepted.gates, "final": log.lines[-1]}

    def _begin(self, accepted: Measurements, source: HiddenStateSource, step: int, steps: int,
               log: Log) -> None:
        with source.in_use():
            measured = accepted.begin(step, steps)
        if measured:
            log.write({"step": 0, **measured.figures()})
        if self.compile and step < steps:
            print("train: compiling the drafter in the first step, half a minute or more without a word",
                  flush=True)

    def _steps(self, rows: Rows) -> int:
        steps = rows.count(self.epochs) // self.accumulate if self.steps is None else self.steps
        if not steps:
            raise UserError(f"train.epochs={self.epochs} gives {rows.count(self.epochs)} packed rows, fewer "
                            f"than train.accumulate={self.accumulate}; lower accumulate or give more prompts")
        return steps

    @torch.no_grad()
    def _heldout(self, drafter: Drafter, samples: list[Sample],
                 source: HiddenStateSource) -> dict[str, float]:
        """Loss and teacher-forced accepted length on the held-out samples, at anchors that never change."""
        if not samples:
            return {}
        rows = Rows(samples, source, self.tokens, seed=0, device=self.runtime.device)
        totals: dict[str, tuple[float, float]] = {}
        drafter.eval()
        count = rows.count(1)
        with torch.compiler.set_stance("force_eager"), \
                closing(Prefetch(rows.row, source.ahead, count)) as ready, source.in_use():
            for number in range(count):  # too few rows to be worth a second compilation
                add(totals, forward(drafter, ready.get(number), self.precision))
        drafter.train()
        return _named(means(totals), loss="heldout_loss", accepted_length="heldout_estimate")


def _position(root: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """Where the run stands: at its newest checkpoint, which is loaded, or at the beginning."""
    position = {"step": 0, "tokens": 0, "seconds": 0.0, "sums": {}, "log": [], "best": None, "gates": {}}
    if saved := checkpoint.newest(root):
        position |= checkpoint.load(saved, drafter, optimizer)
        print(f"train: going on after step {position['step']} of {steps}")
    return position


def _take_best(drafter: Drafter, accepted: Measurements, steps: int, root: Path,
               first: dict[str, Any]) -> dict[str, Any]:
    """Leaves the drafter of the best step; for the record its number and what it accepted, and before it what
    was accepted before training, from the `first` line of the log."""
    best = accepted.best
    if best is None:
        return {}
    if best["step"] != steps:
        by = f" of the mix {best['mix']:.3f}, of all prompts" if "mix" in best else ""
        print(f"train: step {best['step']} is taken, not the last, as it was measured best (accepted length"
              f"{by} {best['measured']:.3f})", flush=True)
        checkpoint.load_best(root, best["step"], drafter)
    before = {} if first["step"] else {"before_training": first["measured"]}  # an older run has none
    mixed = {"mix": best["mix"], "mix_before": first["mix"]} if "mix" in best else {}
    return {**before, "best_step": best["step"], "accepted_length": best["measured"], **mixed}


def _trainable(samples: list[Sample], required: bool = True) -> list[Sample]:
    """Samples with at least two sampled tokens: a block needs an anchor and something to predict."""
    kept = [sample for sample in samples if sample.supervised >= 2]
    if required and not kept:
        raise UserError(f"none of the {len(samples)} training samples has two supervised tokens, so there is "
                        "nothing to learn; look at the answers in the responses stage")
    return kept


def _line(taken: Taken, figures: dict[str, float], watch: Watch) -> dict[str, Any]:
    return {"step": taken.step, "tokens": watch.tokens, "lr": taken.lr, "grad_norm": taken.grad_norm,
            "seconds": round(watch.seconds, 2), **_named(figures, loss="loss", accepted_length="estimate")}


def _named(figures: dict[str, float], **names: str) -> dict[str, float]:
    """The figures under other names, without those that nothing was counted for."""
    return {name: figures[figure] for figure, name in names.items() if figure in figures}


def _merge(sums: dict[str, tuple[float, float]], totals: dict[str, tuple[float, float]]) -> None:
    for name, (total, count) in totals.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + total, before[1] + count)


def _share(taken: Taken, name: str) -> float:
    total, count = taken.totals[name]
    return total / count if count else 0.0
