"""Stages named `hidden_states`: `Extract` writes shards for every sample, `Probe` only passes the gates.

Both end with the manifest and the parity gates, so that no training starts on states that are not the
target's. """

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer.data.responses import read_samples
from trainer.engines.base import TargetEngine
from trainer.errors import UserError
from trainer.gates import Gate, require
from trainer.hidden_states import shards
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.parity import parity_gates
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.records import HiddenStates, Sample
from trainer.target import Target


@dataclass(frozen=True)
class Probe(Stage):
    """For online training: no shards, the gates on `probe_rows` samples asked from the engine."""

    target: Target
    engine: TargetEngine
    tap_layers: list[int]
    dtype: str
    probe_rows: int
    source: Any  # what training builds on this stage's folder; declared here because the two belong together
    runtime: dict[str, Any]

    after: ClassVar[tuple[str, ...]] = ("responses",)
    version: ClassVar[int] = 1

    def external(self) -> dict[str, Any]:
        return {"target": self.target.identity}

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        samples = _samples(inputs["responses"])
        layers = _checked_layers(self.tap_layers, self.target)
        with self.engine.load(self.target.folder, self.target.end_ids) as engine:
            gates = self._gates(samples, lambda sample: next(engine.hidden_states([sample.tokens], layers)),
                                layers)
        tokens = sum(len(sample.tokens) for sample in samples)
        Manifest(self.target.identity, self.target.template_hash, layers, self.dtype, tokens, {},
                 []).write(out)
        return {"gates": gates, "samples": len(samples), "tokens": tokens, "bytes": 0}

    def _gates(self, samples: list[Sample], get: Callable[[Sample], HiddenStates],
               layers: list[int]) -> dict[str, Any]:
        probe = samples[::max(1, len(samples) // self.probe_rows)][:self.probe_rows]
        found = {sample.id: get(sample) for sample in probe}
        bad = sum(map(shards.bad_rows, found.values()))
        rows = Gate("bad_rows", bad, 0, "<=", "some states are all zero or not finite: the engine returned "
                    "states of tokens that it did not compute")
        return require([rows, *parity_gates(self.target, probe, lambda sample: found[sample.id], layers,
                                            getattr(torch, self.dtype), self.runtime["device"])])


@dataclass(frozen=True)
class Extract(Probe):
    """For offline training: every sample's states in shards of about `shard_tokens` tokens."""

    shard_tokens: int

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        samples = _samples(inputs["responses"])
        layers = _checked_layers(self.tap_layers, self.target)
        planned = shards.plan(samples, self.shard_tokens)
        self._write_missing(planned, layers, out)
        where, described = shards.describe_shards(out, planned)
        tokens = sum(len(sample.tokens) for sample in samples)
        Manifest(self.target.identity, self.target.template_hash, layers, self.dtype, tokens, where,
                 described).write(out)
        gates = self._gates(samples, shards.ShardReader(out).get, layers)
        size = sum(path.stat().st_size for path in out.glob("shard-*"))
        return {"gates": gates, "samples": len(samples), "tokens": tokens, "bytes": size,
                "bytes_per_token": round(size / tokens)}

    def _write_missing(self, planned: list[list[Sample]], layers: list[int], out: Path) -> None:
        missing = [number for number in range(len(planned)) if not shards.shard_path(out, number).exists()]
        total, done = (sum(len(sample.tokens) for number in numbers for sample in planned[number])
                       for numbers in (range(len(planned)), set(range(len(planned))) - set(missing)))
        if not missing:
            return
        with self.engine.load(self.target.folder, self.target.end_ids) as engine, \
                Progress("hidden_states", total=total, unit="tokens", start=done) as bar:
            for number in missing:
                states = []
                for sample in planned[number]:
                    states.append(next(engine.hidden_states([sample.tokens], layers)))
                    bar.advance(len(sample.tokens), shard=f"{number + 1}/{len(planned)}")
                if bad := sum(map(shards.bad_rows, states)):
                    raise UserError(f"{bad} rows of hidden states are all zero or not finite (samples "
                                    f"{planned[number][0].id} to {planned[number][-1].id}); the engine does "
                                    "not compute what it returns: try target_engine.dtype=float32")
                shards.write_shard(out, number, planned[number], states)


def _samples(responses: Path) -> list[Sample]:
    return read_samples(responses, "train") + read_samples(responses, "heldout")


def _checked_layers(tap_layers: list[int], target: Target) -> list[int]:
    layers, count = sorted(set(tap_layers)), target.config["num_hidden_layers"]
    if not layers or layers[0] < 0 or layers[-1] > count:
        raise UserError(f"hidden_states.tap_layers {list(tap_layers)} must lie between 0 (embeddings) and "
                        f"{count} (after the last layer of {target.name})")
    return layers
