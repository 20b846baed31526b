"""Hidden states from the disk where they are, asked from the target and kept where they are not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.engines.base import TargetEngine
from trainer.errors import UserError
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.hidden_states.online import Online
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import GIB
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates, Sample
from trainer.target import Target

RESERVE = GIB  # bytes of the disk that are never filled


class Hybrid(HiddenStateSource):
    """`folder` is the finished `hidden_states` stage, and the cache that grows in it.

    As online in the first epoch, while samples are kept until `runtime.budget_gib` (null: as much as the disk
    has) is used up; from then on a kept sample is read, any other is asked for again. Where another process
    fills the same cache, this one reads what that one has committed, and keeps nothing itself.
    """

    def __init__(self, folder: Path, layers: Sequence[int], target: Target, engine: TargetEngine,
                 runtime: dict[str, Any]) -> None:
        manifest = Manifest.read(folder)
        self.reader = ShardReader(folder, layers, runtime["verify"])
        self.writer = self._writer(folder, manifest, runtime)
        # what is kept has all the layers of the cache, whoever asks for it
        asked = manifest.tap_layers if self.writer else layers
        self.online = Online(folder, asked, target, engine, runtime)
        self.commit_tokens = runtime["commit_tokens"]
        budget = runtime["budget_gib"]
        free = max(0, shutil.disk_usage(folder).free - RESERVE)
        used = sum(path.stat().st_size for path in folder.glob("shard-*.bin"))
        self.room = free if budget is None else min(free, max(0, int(budget * GIB) - used))
        self._waiting = 0
        self._keeping = threading.Lock()

    @property
    def ahead(self) -> int:
        return self.online.ahead

    def get(self, sample: Sample) -> HiddenStates:
        if self.reader.has(sample):
            return self.reader.get(sample)
        states = self.online.ask(sample)
        if self.writer is not None:
            self._keep(sample, states, self.writer)
        return self.reader.codec.roundtrip(self._part(states), sample.loss_mask)

    def close(self) -> None:
        try:
            self.online.close()
        finally:
            if self.writer is not None:
                self.writer.commit()
                self.writer.close()
            self.reader.close()

    def _writer(self, folder: Path, manifest: Manifest, runtime: dict[str, Any]) -> ShardWriter | None:
        try:
            return ShardWriter(folder, manifest, int(runtime["shard_gib"] * GIB))
        except Busy as error:
            print(f"hidden_states: {error}; this run reads what it has and asks for the rest", flush=True)
            return None

    def _keep(self, sample: Sample, states: HiddenStates, writer: ShardWriter) -> None:
        """Appends the sample unless the budget is used up or another thread was faster."""
        with self._keeping:
            size = writer.size(sample)
            if size > self.room or writer.has(sample.id):
                return
            writer.append(sample, states)
            self.room -= size
            self._waiting += len(sample.tokens)
            if self._waiting >= self.commit_tokens:
                writer.commit()
                self._waiting = 0

    def _part(self, states: HiddenStates) -> HiddenStates:
        """The asked-for layers of what was asked from the target."""
        codec, stored = self.reader.codec, self.online.codec.layers
        if codec.layers == stored:
            return states
        places = [stored.index(layer) for layer in codec.layers]
        taps = states.taps.unflatten(-1, (len(stored), codec.hidden))[:, places]
        return HiddenStates(taps.flatten(1), states.last)
