"""Acceptance while training goes on: real draft-and-verify decoding from the exported folder, beside the
trainer's own estimate along the same walk.

The drafter is exported into a temporary folder, read back from it alone, and answers held-out prompts with
the target in this process, whatever `target_engine` is: as in the stage `evaluate`, a vLLM server cannot be
read step by step. *Measured* is the accepted length of that.

The *estimate* replays the same tokens: at the newest token the trainer's float32 weights draft, the draft is
compared with what the target said, and the walk goes on behind what was accepted, as vLLM walks. They are the
measurement's own greedy tokens, never a stored answer, which may have been sampled, or computed in another
dtype and part from the greedy text of this engine: then the walks would differ without any fault. Hidden
states are the stored ones as far as the stored answer has the same tokens from its start, which is all of a
greedy and complete answer and at least the prompt of any other; behind that they are asked of this engine.
So estimate and measurement differ by what may go wrong between training and serving (the folder, the stored
states, the engine's numerics) and are equal up to rounding when nothing does. Known samples against held-out
ones are compared along stored answers on both sides, whatever made them, so that overfitting (`train_walk`
above `heldout_walk`, no gap) looks unlike a fault of serving (a gap).

Where a gap is beyond the tolerance and twice its standard error, the same tokens are replayed with one thing
changed at a time, and what moves the accepted length most is the cause that is told. """

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from trainer.architectures.base import Drafter
from trainer.data import slices
from trainer.data.splits import in_turn, spread
from trainer.engines.base import TargetEngine
from trainer.evaluate import mix
from trainer.evaluate.decode import Counts, decode, replay
from trainer.export.formats import FORMATS, FormatName, Serving
from trainer.gates import Gate
from trainer.kernels.select import Verify, require_verify, verify
from trainer.ranges import Count, Dtype, Filled, Positive, SequenceLength
from trainer.records import HiddenStates, Sample
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import MakeDrafter, draft_problem
from trainer.training.measuring import Measured, Measuring

States = Callable[[Sample], HiddenStates]
COARSE = 0.1  # relative change of hidden states up to which it may be rounding (eight bits: 0.07 at most)
NAMED = 3     # tensors that a message names


@dataclass(frozen=True)
class AcceptanceRuntime:
    """The temporary folder has the first of `formats`; all describe the same drafter. `verify` is the kernel
    by which drafts are verified; each gives the same tokens."""

    formats: Annotated[list[FormatName], Filled()]
    verify: Verify


@dataclass(frozen=True)
class Acceptance(Measuring):
    """Before the first step, every `every` steps (null: never) and after the last, with `prompts` held-out
    prompts, answers of up to `max_new_tokens` and drafts of `k` (null: the longest), from a folder in
    `dtype`. A relative gap above `tolerance` stops the run. With `weights` prompts of the slices that count
    are answered, in turn, and the best step is that of their mix."""

    every: Count | None
    prompts: Count
    max_new_tokens: SequenceLength
    k: Count | None
    dtype: Dtype
    tolerance: Positive
    weights: mix.Weights
    engine: TargetEngine
    runtime: AcceptanceRuntime

    def check(self, make: MakeDrafter) -> dict[str, str]:
        problem = None if self.k is None else draft_problem(make, self.k)
        found = {} if problem is None else {"k": problem}
        if self.engine.in_flight:
            found["engine"] = ("must compute in this process, as trainer.engines.transformers."
                               "TransformersEngine does, since servers cannot be read step by step")
        if self.weights and self.every is None:
            found["weights"] = ("choose the best step by what is measured, and nothing is, as "
                                "train.acceptance.every is null; give one of the two another value")
        return found | mix.weights_problems(self.weights)

    def preflight(self) -> None:
        self.engine.preflight()
        require_verify(self.runtime.verify, self.engine.device)

    def due(self, step: int, steps: int) -> bool:
        return self.every is not None and (step % self.every == 0 or step == steps)

    def usable(self, samples: Sequence[Sample]) -> list[Sample]:
        """`prompts` of those that have a prompt and room for an answer, spread over all."""
        fitting = [sample for sample in samples if 1 <= _prompt(sample) <= self.engine.max_length - 2]
        if not self.weights:
            return spread(fitting, self.prompts, lambda sample: sample.category)
        counted = [sample for sample in fitting if mix.weight(self.weights, slices.of_sample(sample))]
        return in_turn(counted or fitting, self.prompts,
                       lambda sample: mix.cell(self.weights, slices.of_sample(sample)))

    def require(self, heldout: Sequence[Sample]) -> None:
        chosen, there = ([slices.of_sample(sample) for sample in some]
                         for some in (self.usable(heldout), heldout))
        mix.require_slices(self.weights, "train.acceptance.weights", chosen, there,
                           "train.acceptance.prompts, or target.max_length")

    @torch.no_grad()
    def measure(self, drafter: Drafter, target: Target, heldout: Sequence[Sample],
                training: Sequence[Sample], states: States, folder: Path) -> Measured:
        was_training, k = drafter.training, self.k or drafter.max_k
        drafter.eval()
        try:
            with torch.random.fork_rng(devices=[]), self._read_back(drafter, target, folder) as served, \
                    self.engine.load(target.folder, target.end_ids) as engine:
                given = [(sample, states(sample)) for sample in self.usable(heldout)]
                walks = [self._walk(engine, target, drafter, served, *pair, k) for pair in given]
                unknown = [self._stored(drafter, *pair, k) for pair in given]
                known = [self._stored(drafter, sample, states(sample), k) for sample in self.usable(training)]
                gap, error = _gap(walks), _error(lambda part: _gap(_some(walks, part)), len(walks))
                gates = [] if error is None else [
                    self._gate(drafter, served, walks, k, gap, max(self.tolerance, 2 * error))]
        finally:
            drafter.train(was_training)
        errors = [_error(lambda part, own=counts: _length(_some(own, part)), len(counts))
                  for counts in (known, unknown)]
        ahead = None if None in errors else math.hypot(*errors) / _length(unknown)
        parts = [(slices.of_sample(sample), walk.measured)
                 for (sample, _), walk in zip(given, walks, strict=True)]
        return Measured(_length([walk.measured for walk in walks]),
                        _length([walk.estimate for walk in walks]), gap, error, _length(unknown),
                        _length(known), _length(known) / _length(unknown) - 1, ahead, len(walks), gates,
                        mix.lengths(parts, slices.differing(found for found, _ in parts)),
                        mix.mixed(self.weights, parts))

    def _gate(self, drafter: Drafter, served: Drafter, walks: Sequence[_Walk], k: int, gap: float,
              bound: float) -> Gate:
        cause = "the exported folder, the stored hidden states or this engine are not as in training"
        if abs(gap) > bound:
            lengths = [_length([getattr(walk, name) for walk in walks]) for name in ("measured", "estimate")]
            cause = (f"{_cause(drafter, served, walks, k)} (accepted length {lengths[0]:.3f} decoded, "
                     f"{lengths[1]:.3f} by training's own estimate along the same answers)")
        return Gate("measured_acceptance_gap", abs(gap), bound, "<=", cause)

    @contextmanager
    def _read_back(self, drafter: Drafter, target: Target, folder: Path) -> Iterator[Drafter]:
        """The drafter that its exported folder describes, which is there for as long."""
        form = FORMATS[self.runtime.formats[0]]
        serving = Serving(str(target.folder), target.config.get("architectures") or [], drafter.max_k,
                          target.folder)
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        try:
            form.write(folder, drafter.export(), serving, getattr(torch, self.dtype))
            head = load_target_head(target.folder, target.config)
            yield type(drafter).restore(form.read(folder), form.name, head).to(_device(drafter))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _walk(self, engine: TargetEngine, target: Target, drafter: Drafter, served: Drafter, sample: Sample,
              stored: HiddenStates, k: int) -> _Walk:
        prompt = _prompt(sample)
        decoded = decode(engine, served, verify(self.runtime.verify), sample.tokens[:prompt], k,
                         self.max_new_tokens, target.end_ids)
        known = (*sample.tokens[:prompt], *decoded.tokens, *decoded.beyond)
        live = next(iter(engine.hidden_states([known], drafter.tap_layers))).taps.to(_device(drafter)).float()
        pairs = enumerate(zip(known, sample.tokens, strict=False))
        same = next((place for place, (one, two) in pairs if one != two), min(len(known), len(sample.tokens)))
        taps = torch.cat([stored.taps[:same].to(live), live[same:]])
        known_walk = known, prompt, len(decoded.tokens)
        return _Walk(*known_walk, same, taps, live, decoded.counts,
                     replay(drafter, known, taps, prompt, len(decoded.tokens), k))

    def _stored(self, drafter: Drafter, sample: Sample, states: HiddenStates, k: int) -> Counts:
        """The walk along the stored answer, as far as decoding would go."""
        prompt = _prompt(sample)
        length = next((place for place, given in enumerate(sample.loss_mask[prompt:]) if not given),
                      len(sample.tokens) - prompt)
        known = sample.tokens[:prompt + length]
        return replay(drafter, known, states.taps.to(_device(drafter)), prompt,
                      min(length, self.max_new_tokens), k)


@dataclass(frozen=True)
class _Walk:
    """A held-out prompt that was answered. `known` are `prompt` tokens of it, `length` of its answer, and
    what came behind that; `taps` are the stored states of the first `same`, and the engine's own of the rest,
    `live` the engine's own of all, [known, layers * hidden] float32."""

    known: tuple[int, ...]
    prompt: int
    length: int
    same: int
    taps: Tensor
    live: Tensor
    measured: Counts
    estimate: Counts

    def live_with(self, drafter: Drafter, k: int) -> Counts:
        return replay(drafter, self.known, self.live, self.prompt, self.length, k)


def _cause(drafter: Drafter, served: Drafter, walks: Sequence[_Walk], k: int) -> str:
    """The likeliest cause of a gap. From the estimate to the measurement three things change one by one: the
    stored states for the engine's own, the trainer's drafter for the one read back, the replay for decoding;
    the first stands for the states, the second for the folder, the third for the engine."""
    if tuple(served.tap_layers) != tuple(drafter.tap_layers):
        return (f"the exported folder names layer ids {list(served.tap_layers)} where the drafter is trained "
                f"on {list(drafter.tap_layers)}: see export() and restore() of its class")
    lengths = [_length([walk.estimate for walk in walks]),
               _length([walk.live_with(drafter, k) for walk in walks]),
               _length([walk.live_with(served, k) for walk in walks]),
               _length([walk.measured for walk in walks])]
    moves = [abs(after - before) for before, after in zip(lengths, lengths[1:], strict=False)]
    if moves[0] == max(moves):
        return _states_cause(drafter, walks)
    if moves[1] == max(moves):
        return _folder_cause(drafter, served)
    return ("the engine of train.acceptance.engine gives other hidden states or tokens step by step than in "
            "one pass: its numerics (dtype; compare in float32) or the rewind of its cache")


def _states_cause(drafter: Drafter, walks: Sequence[_Walk]) -> str:
    kept, live = (drafter.parts(torch.cat([getattr(walk, name)[:walk.same] for walk in walks]))
                  for name in ("taps", "live"))
    changes = {name: float((kept[name] - live[name]).norm() / live[name].norm()) for name in live}
    worst = max(changes, key=changes.__getitem__)
    differ = f"the stored {worst} differ by {changes[worst]:.0%} "
    if changes[worst] > COARSE:
        return (f"{differ}from those that the target gives now: they are stale, of another target, or one "
                f"layer off; remove the folder of the stage hidden_states and extract them anew")
    return (f"{differ}from those of train.acceptance.engine, to which this drafter is sensitive: other "
            f"numerics (target_engine.dtype, hidden_states.storage; compare in float32), or a layer beside")


def _folder_cause(drafter: Drafter, served: Drafter) -> str:
    ours, theirs = ({**dict(each.named_parameters()), **dict(each.named_buffers())}
                    for each in (drafter, served))
    both = ours.keys() & theirs.keys()  # what training alone needs is not read back
    coarse = {name for name in both if ours[name].shape == theirs[name].shape
              and torch.allclose(ours[name].float(), theirs[name].float(), rtol=COARSE, atol=1e-3)}
    names = sorted(both - coarse)
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return (f"the exported folder, read back, has another {', '.join(names[:NAMED])}{more} than the "
                f"trained drafter: a config key (rope for rotary.*, head_dim) or a tensor is not what "
                f"export() of its class was given")
    return ("the exported folder, read back, drafts otherwise though its layer ids and tensors are those of "
            "the trained drafter: a config key without a tensor (mask token, causality), or "
            "train.acceptance.dtype rounds too much")


def _prompt(sample: Sample) -> int:
    """Tokens before the first that the target sampled."""
    return sample.loss_mask.index(True)


def _device(drafter: Drafter) -> torch.device:
    return next(drafter.parameters()).device


def _length(counts: Sequence[Counts]) -> float:
    total = Counts()
    for each in counts:
        total.add(each)
    return total.accepted_length


def _gap(walks: Sequence[_Walk]) -> float:
    return _length([walk.measured for walk in walks]) / _length([walk.estimate for walk in walks]) - 1


def _some(all_of: Sequence[Any], part: Sequence[int]) -> list[Any]:
    return [all_of[place] for place in part]


def _error(figure: Callable[[Sequence[int]], float], count: int) -> float | None:
    """The standard error of a figure of `count` prompts, by the jackknife: one left out at a time."""
    if count < 2:
        return None
    parts = [figure([place for place in range(count) if place != left]) for left in range(count)]
    mean = sum(parts) / count
    return math.sqrt((count - 1) / count * sum((part - mean) ** 2 for part in parts))
