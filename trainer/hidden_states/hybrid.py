"""Hidden states from the disk where they are stored, asked from the target and kept where they are not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.engines.base import TargetEngine
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.hidden_states.online import Online
from trainer.hidden_states.reader import ShardReader, Verify
from trainer.hidden_states.shards import GIB
from trainer.hidden_states.writer import FolderBusy, ShardWriter
from trainer.ranges import Count, NotNegative, Positive
from trainer.records import HiddenStates, Sample
from trainer.target import Target

RESERVE = GIB  # bytes of the disk that are never filled


@dataclass(frozen=True)
class HybridRuntime:
    """Up to `budget_gib` are stored (null: what the disk has) in shards of up to `shard_gib`, and committed
    every `commit_tokens` tokens; `verify` says when checksums are compared."""

    budget_gib: NotNegative | None
    verify: Verify
    shard_gib: Positive
    commit_tokens: Count


class Hybrid(HiddenStateSource):
    """`folder` is the finished `hidden_states` stage, in which the stored states grow.

    As online in the first epoch, and every sample is kept until `runtime.budget_gib` (null: what the disk
    has) is used up; from then on a kept sample is read, any other is asked for again. Where another process
    is filling the same folder, this one reads what that one has committed and keeps nothing itself.
    """

    def __init__(self, folder: Path, layers: Sequence[int], target: Target, engine: TargetEngine,
                 runtime: HybridRuntime) -> None:
        self.reader = ShardReader(folder, layers, runtime.verify)
        self.writer = _writer(folder, self.reader.manifest, int(runtime.shard_gib * GIB))
        # what is kept has all layers of the folder, whoever asks for it
        asked = self.reader.manifest.tap_layers if self.writer else layers
        self.online = Online(folder, asked, target, engine)
        self.commit_tokens = runtime.commit_tokens
        used = sum(path.stat().st_size for path in folder.glob("shard-*.bin"))
        self.room = max(0, shutil.disk_usage(folder).free - RESERVE)
        if runtime.budget_gib is not None:
            self.room = min(self.room, max(0, int(runtime.budget_gib * GIB) - used))
        self._uncommitted = 0  # tokens
        self._keeping = threading.Lock()

    @property
    def ahead(self) -> int:
        return self.online.ahead

    def get(self, sample: Sample) -> HiddenStates:
        if self._stored(sample):
            return self.reader.get(sample)
        states = self.online.ask(sample)
        if self.writer is not None:
            self._keep(sample, states, self.writer)
        return self.reader.codec.roundtrip(self._part(states), sample.loss_mask)

    def give_up(self) -> None:
        self.online.give_up()

    def close(self) -> None:
        try:
            self.online.close()
        finally:
            if self.writer is not None:
                self.writer.commit()
                self.writer.close()
            self.reader.close()

    def _stored(self, sample: Sample) -> bool:
        """Whether the sample can be read; commits it first where it was only appended."""
        if self.writer is not None:
            with self._keeping:
                if self.writer.pending(sample.id):
                    self.writer.commit()
        return self.reader.has(sample.id)

    def _keep(self, sample: Sample, states: HiddenStates, writer: ShardWriter) -> None:
        """Appends the sample, unless the budget is used up or another thread was faster."""
        with self._keeping:
            size = writer.size(sample)
            if size > self.room or writer.has(sample.id) or writer.pending(sample.id):
                return
            writer.append(sample, states)
            self.room -= size
            self._uncommitted += len(sample.tokens)
            if self._uncommitted >= self.commit_tokens:
                writer.commit()
                self._uncommitted = 0

    def _part(self, states: HiddenStates) -> HiddenStates:
        """The layers that are wanted, of those that were asked for."""
        codec, asked = self.reader.codec, self.online.codec.layers
        if codec.layers == asked:
            return states
        places = [asked.index(layer) for layer in codec.layers]
        return HiddenStates(states.taps.unflatten(-1, (len(asked), codec.hidden))[:, places].flatten(1),
                            states.last)


def _writer(folder: Path, manifest: Manifest, shard_bytes: int) -> ShardWriter | None:
    try:
        return ShardWriter(folder, manifest, shard_bytes)
    except FolderBusy as error:
        print(f"hidden_states: {error}. This run goes on without: it reads what that one stores, and asks "
              "for the rest", flush=True)
        return None
