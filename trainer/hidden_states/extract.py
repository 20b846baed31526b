"""Stages named `hidden_states`: `Extract` stores every sample's states, `Probe` only passes the gates.

Both begin with the manifest and end with the parity gates, so that no training starts on states that are not
the target's. """

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer.data.responses import RESPONSES, read_samples
from trainer.engines.base import TargetEngine
from trainer.errors import GateFailed, UserError
from trainer.gates import Gate, require
from trainer.hidden_states import reuse
from trainer.hidden_states.base import LastRows, MakeSource, Manifest, Storage
from trainer.hidden_states.codec import Codec, bad_rows
from trainer.hidden_states.parity import parity_gates
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import GIB, again
from trainer.hidden_states.writer import ShardWriter
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import Count, Device, Dtype, Layers, Positive, require_device
from trainer.records import HiddenStates, Sample
from trainer.target import Target


@dataclass(frozen=True)
class ProbeRuntime:
    """Where the gates compute."""

    device: Device


@dataclass(frozen=True)
class ExtractRuntime(ProbeRuntime):
    """A shard grows up to `shard_gib`; what was appended is committed every `commit_tokens` tokens."""

    shard_gib: Positive
    commit_tokens: Count


@dataclass(frozen=True)
class Probe(Stage):
    """For online training: nothing is stored, the gates on `probe_rows` samples asked from the engine.
    `storage` and `last_rows` as in `codec`: training gets the states as if they had been stored so."""

    target: Target
    engine: TargetEngine
    tap_layers: Layers
    dtype: Dtype
    storage: Storage
    last_rows: LastRows
    probe_rows: Count
    source: MakeSource  # what training builds on this stage's folder; the two belong together
    runtime: ProbeRuntime

    after: ClassVar[tuple[str, ...]] = ("responses",)
    version: ClassVar[int] = 2

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def preflight(self) -> None:
        require_device(self.runtime.device, "hidden_states.runtime.device")
        self._layers()

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        samples, manifest = _samples(inputs["responses"]), self.manifest()
        manifest.write(out)
        codec = Codec.of(manifest)
        with self.engine.load(self.target.folder, self.target.end_ids) as engine:
            def get(sample: Sample) -> HiddenStates:
                states = next(iter(engine.hidden_states([sample.tokens], codec.layers)))
                codec.check(sample, states)
                return codec.roundtrip(states, sample.loss_mask)

            gates = self._gates(samples, get, codec)
        tokens = sum(len(sample.tokens) for sample in samples)
        return {"gates": gates, "samples": len(samples), "tokens": tokens, "bytes": 0}

    def manifest(self) -> Manifest:
        """What the folder will say about itself."""
        return Manifest(self.target.identity, self.target.template_hash, self._layers(),
                        self.target.config["hidden_size"], self.dtype, self.storage, self.last_rows,
                        self.engine.origin)

    def _layers(self) -> list[int]:
        layers, count = sorted(set(self.tap_layers)), self.target.config["num_hidden_layers"]
        if not layers or layers[0] < 0 or layers[-1] > count:
            key = "target" if [*self.tap_layers] == [*self.target.tap_layers] else "hidden_states"
            raise UserError(f"{key}.tap_layers {list(self.tap_layers)} must lie between 0 "
                            f"(embeddings) and {count} (after the last layer of {self.target.name})")
        return layers

    def _gates(self, samples: list[Sample], get: Callable[[Sample], HiddenStates],
               codec: Codec) -> dict[str, Any]:
        asked = [sample for sample in samples if sample.supervised] or samples
        probe = asked[::max(1, len(asked) // self.probe_rows)][:self.probe_rows]
        found = {sample.id: get(sample) for sample in probe}
        bad = sum(bad_rows(found[sample.id], codec.kept(sample.loss_mask)) for sample in probe)
        rows = Gate("bad_rows", bad, 0, "<=", "some states are all zero or not finite: the engine returned "
                    "states of tokens that it did not compute")
        return require([rows, *parity_gates(self.target, probe, lambda sample: found[sample.id], codec,
                                            getattr(torch, self.dtype), self.runtime.device)])


@dataclass(frozen=True)
class Extract(Probe):
    """For offline training: every sample's states are stored, in shards of up to `runtime.shard_gib`. What
    was appended is committed every `runtime.commit_tokens` tokens; a killed run goes on behind the last
    commit.

    Nothing is extracted where the states are already: in `path`, a folder made elsewhere, or in one that an
    earlier run left beside this stage's. The stage's folder then holds links to their files.
    """

    path: str | None
    runtime: ExtractRuntime

    sized: ClassVar[tuple[str, ...]] = ("shard-*.bin", "index.bin")

    def preflight(self) -> None:
        super().preflight()
        if self.path is not None:
            reuse.foresee(reuse.given(self.path), self.manifest())

    def foresee(self, inputs: dict[str, Path]) -> None:
        super().foresee(inputs)
        if self.path is not None and "responses" in inputs:
            reuse.foresee(reuse.given(self.path), self.manifest(), _samples(inputs["responses"]))

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        samples, manifest = _samples(inputs["responses"]), self.manifest()
        reuse.forget(out)
        if self.path is not None:
            reuse.adopt(found := reuse.given(self.path), out, manifest, samples)
        elif (found := reuse.find(out, manifest, samples)) is not None:
            reuse.link(found, out)
        else:
            with ShardWriter(out, manifest, int(self.runtime.shard_gib * GIB)) as writer:
                self._append_missing(samples, writer)
        shutil.copyfile(inputs["responses"] / RESPONSES, out / RESPONSES)  # whoever takes the folder has both
        reader = ShardReader(out, manifest.tap_layers)
        try:
            gates = self._gates(samples, reader.get, reader.codec)
        except GateFailed as error:  # what is stored stays wrong, whatever is mended
            raise GateFailed(f"{error}; the states lie in {out}: {again(out)}") from error
        finally:
            reader.close()
        tokens = sum(len(sample.tokens) for sample in samples)
        size = sum(path.stat().st_size for path in (*out.glob("shard-*.bin"), reader.index.path))
        return {"gates": gates, "samples": len(samples), "tokens": tokens, "bytes": size,
                "bytes_per_token": round(size / tokens), "reused": None if found is None else str(found)}

    def _append_missing(self, samples: list[Sample], writer: ShardWriter) -> None:
        missing = [sample for sample in samples if not writer.has(sample.id)]
        if not missing:
            return
        total, left = (sum(len(sample.tokens) for sample in some) for some in (samples, missing))
        require_room(missing, writer)
        waiting = 0
        with self.engine.load(self.target.folder, self.target.end_ids) as engine, \
                Progress("hidden_states", total=total, unit="tokens", start=total - left) as bar:
            states = engine.hidden_states([sample.tokens for sample in missing], writer.codec.layers)
            for sample, state in zip(missing, states, strict=True):
                writer.append(sample, state)
                waiting += len(sample.tokens)
                if waiting >= self.runtime.commit_tokens:
                    writer.commit()
                    waiting = 0
                bar.advance(len(sample.tokens))


def require_room(missing: list[Sample], writer: ShardWriter) -> None:
    """Says in one line what will be written, before it is computed; raises where it cannot fit."""
    size, free = sum(map(writer.size, missing)), shutil.disk_usage(writer.folder).free
    place = writer.folder.parent  # the folder itself bears another name while it is written
    if size > free:
        raise UserError(f"the hidden states of {len(missing)} samples take {size / GIB:.3g} GiB in storage "
                        f"{writer.codec.storage}, and {free / GIB:.3g} GiB are free in {place}: "
                        f"{ways_out(writer.codec.storage)}; `run=[plan]` shows what fits")
    print(f"hidden_states: {len(missing)} samples to extract, {size / GIB:.3g} GiB; {free / GIB:.3g} GiB "
          f"are free in {place}", flush=True)


def ways_out(storage: str) -> str:
    """What to set when there is no room for all states in this storage."""
    halved = "hidden_states.storage=float8_e4m3fn for half of it, " if storage == "native" else ""
    return (f"set {halved}hidden_states=hybrid to store what fits, hidden_states=online to store nothing, or "
            "run_root= on another disk")


def _samples(responses: Path) -> list[Sample]:
    return read_samples(responses, "train") + read_samples(responses, "heldout")
