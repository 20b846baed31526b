"""One training from where it stands to its last step: what is due between the steps that the loop takes.

All processes that train go through it in step. The first one alone measures, tells and writes, with the whole
drafter that its strategy gives it; the others wait for it in the next step."""

from __future__ import annotations

import zlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.architectures.base import Drafter
from trainer.errors import UserError
from trainer.gates import require
from trainer.hidden_states.base import HiddenStateSource
from trainer.hidden_states.prefetch import Prefetch
from trainer.progress import Progress
from trainer.records import Batch, Sample
from trainer.strategies.base import Placed
from trainer.strategies.process import Group
from trainer.training import checkpoint, monitors
from trainer.training.log import Log
from trainer.training.loop import Pace, Taken, add, fit, forward, means
from trainer.training.measuring import SHOWN, Measurements
from trainer.training.rows import Rows
from trainer.training.watch import Watch

if TYPE_CHECKING:
    from trainer.training.stage import Train


FILLED = "filled"  # among the sums: tokens of samples, and of rows


class Course:
    """Of the stage `train`, with a fresh drafter on the device of the group."""

    def __init__(self, stage: Train, group: Group, drafter: Drafter, samples: list[Sample],
                 heldout: list[Sample], source: HiddenStateSource, out: Path) -> None:
        self.stage, self.group, self.heldout, self.source = stage, group, heldout, source
        self.rows = Rows(samples, source, stage.tokens, stage.seed, group.device)
        self.steps, self.root = _steps(stage, self.rows), out / "checkpoints"
        self.share = stage.accumulate // group.size  # rows of a step that this process takes
        self.watched = monitors.Monitors(drafter)
        group.agree(strategy=type(stage.runtime.strategy).__name__, steps=self.steps,
                    weights=zlib.crc32(repr(self.watched.start).encode()))
        if group.size > 1:
            print(f"train: {group.size} processes have met, the first on {group.device}, strategy "
                  f"{type(stage.runtime.strategy).__name__.lower()}", flush=True)
        self.placed, position = self._place(drafter)
        self.start = self.step = position["step"]
        self.sums: dict[str, tuple[float, float]] = position["sums"]  # since the last line of the log
        whole = self.placed.whole() or drafter
        self.watched.drafter = whole
        usable = stage.acceptance.usable
        self.accepted = Measurements(stage.acceptance, whole, stage.target, usable(heldout), usable(samples),
                                     source.get, out / "measured", position["best"], position["gates"])
        self.watch, self.writer = Watch(position), checkpoint.Writer()
        self.log: Log | None = None
        self.packed: dict[str, float] = {}  # how samples fill the rows
        if group.main:
            self.log = Log(out / "log.jsonl", position["log"], stage.runtime.wandb_project)

    def _place(self, drafter: Drafter) -> tuple[Placed, dict[str, Any]]:
        """The drafter under its strategy, and where the run stands: at its newest checkpoint, which is
        loaded, or at the beginning."""
        stage = self.stage
        position = {"step": 0, "tokens": 0, "seconds": 0.0, "sums": {}, "log": [], "best": None, "gates": {}}
        saved = self.group.tell(checkpoint.newest(self.root) if self.group.main else None)
        if saved:
            position |= checkpoint.load(saved, drafter)
        placed = stage.runtime.strategy.place(drafter, stage.optimizer, self.group, self.share)
        if saved:
            placed.load_moments(checkpoint.load_moments(saved))
            print(f"train: going on after step {position['step']} of {self.steps}")
        if stage.compile:
            placed.drafter.compile(dynamic=False)
        return placed, position

    def run(self) -> tuple[dict[str, Any], Drafter | None]:
        """What belongs in the record, and the drafter with the weights that the run leaves; both on the first
        process alone."""
        self._begin()
        stage = self.stage
        pace = Pace(self.steps, self.share, stage.warmup, stage.floor, stage.clip, stage.precision)
        told = True  # all that is due after this step was done
        with Progress("train", total=self.steps if self.group.main else 0, unit="steps", start=self.step,
                      warm_up=True) as bar, closing(self.writer), \
                closing(Prefetch(self._row, self.source.ahead, self.steps * self.share)) as ready, \
                self.source.in_use():
            try:
                for taken in fit(self.placed, ready.get, pace, self.step):
                    self.step, told = taken.step, False
                    if taken.fault:
                        raise UserError(taken.fault)
                    measures = self.accepted.due(self.step, self.steps)
                    self._took(taken, measures, bar)
                    told = True
                    if self.step == self.steps or measures or \
                            self.step % stage.runtime.checkpoint_every == 0:
                        self._save()
            except UserError:
                if told and self.step > self.start and self.group.size == 1:
                    self._save()  # the row that could not be had took no part in what was learnt so far
                raise
        return self._end()

    def _row(self, number: int) -> Batch:
        """Row `number` of this process, which has its share of the rows of each step."""
        step, place = divmod(number, self.share)
        return self.rows.row(self.rows.dealt(step, self.stage.accumulate, self.group.size)
                             [self.group.rank][place])

    def _begin(self) -> None:
        if self.log is None:
            return
        self.packed, said = self.rows.told(self.stage.accumulate, self.group.size)
        print(f"train: {said}", flush=True)
        with self.source.in_use():
            measured = self.accepted.begin(self.step, self.steps)
        if measured:
            self.log.write({"step": 0, **measured.figures()})
        if self.stage.compile and self.step < self.steps:
            print("train: compiling the drafter in the first step, half a minute or more without a word",
                  flush=True)

    def _took(self, taken: Taken, measures: bool, bar: Progress) -> None:
        self.watch.took(taken.tokens)
        room = self.stage.accumulate * self.stage.tokens
        _merge(self.sums, {**taken.totals, FILLED: (taken.tokens, room)})
        bar.advance(1, loss=_share(taken, "loss"), accepted=_share(taken, "accepted_length"), lr=taken.lr,
                    **{"tokens/s": self.watch.rate})
        due = self.step == self.steps or self.step % self.stage.heldout_every == 0
        if due or measures or self.step % self.stage.runtime.log_every == 0:
            whole = self.placed.whole()
            if whole is not None:
                self._tell(taken, whole, measures, due, bar)
            self.sums = {}

    def _tell(self, taken: Taken, whole: Drafter, measures: bool, due: bool, bar: Progress) -> None:
        """A line of the log, after what is to be measured for it."""
        assert self.log is not None
        measured = self.accepted.take(self.step) if measures else None
        found: dict[str, Any] = self._heldout(whole) if due else {}
        found |= self.watched.watch(self.step, self.step == self.steps, self.sums, self.log.lines)
        found |= measured.figures() if measured else {}
        self.log.write(_line(taken, means(self.sums), self.watch) | found)
        if measured:
            bar.advance(0, **{name: measured.figures()[name] for name in SHOWN})
            self.accepted.gates = require(measured.gates)

    def _save(self) -> None:
        whole, moments = self.placed.whole(), self.placed.moments()
        if whole is not None and self.log is not None:
            self.writer.save(self.root, self.step, whole, moments,
                             {"tokens": self.watch.tokens, "seconds": self.watch.seconds, "sums": self.sums,
                              "log": self.log.lines, "best": self.accepted.best,
                              "gates": self.accepted.gates}, self.stage.runtime.keep_checkpoints)

    @torch.no_grad()
    def _heldout(self, whole: Drafter) -> dict[str, float]:
        """Loss and teacher-forced accepted length on the held-out samples, at anchors that never change."""
        if not self.heldout:
            return {}
        rows = Rows(self.heldout, self.source, self.stage.tokens, seed=0, device=self.group.device)
        totals: dict[str, tuple[float, float]] = {}
        whole.eval()
        count = rows.count(1)
        with torch.compiler.set_stance("force_eager"), \
                closing(Prefetch(rows.row, self.source.ahead, count)) as ready, self.source.in_use():
            for number in range(count):  # too few rows to be worth a second compilation
                add(totals, forward(whole, ready.get(number), self.stage.precision))
        whole.train()
        return _named(means(totals), loss="heldout_loss", accepted_length="heldout_estimate")

    def _end(self) -> tuple[dict[str, Any], Drafter | None]:
        whole = self.placed.whole()
        if whole is None or self.log is None:
            return {}, None
        self.log.close()
        lines = self.log.lines
        best = _take_best(whole, self.accepted, self.steps, self.root, lines[0])
        return {"steps": self.steps, "tokens": self.watch.tokens,
                "train_seconds": round(self.watch.seconds, 1), **self.packed, **best,
                **monitors.record(lines), "gates": self.accepted.gates, "final": lines[-1]}, whole


def _steps(stage: Train, rows: Rows) -> int:
    steps = rows.count(stage.epochs) // stage.accumulate if stage.steps is None else stage.steps
    if not steps:
        raise UserError(f"train.epochs={stage.epochs} gives {rows.count(stage.epochs)} packed rows, fewer "
                        f"than train.accumulate={stage.accumulate}; lower accumulate or give more prompts")
    return steps


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


def _line(taken: Taken, figures: dict[str, float], watch: Watch) -> dict[str, Any]:
    return {"step": taken.step, "tokens": watch.tokens, "lr": taken.lr, "grad_norm": taken.grad_norm,
            "seconds": round(watch.seconds, 2), "padding": round(1 - figures[FILLED], 4),
            **_named(figures, loss="loss", accepted_length="estimate")}


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
