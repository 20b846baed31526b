"""Hidden states asked from the target while training; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.engines.base import TargetEngine
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.hidden_states.codec import Codec
from trainer.records import HiddenStates, Sample
from trainer.target import Target


class Online(HiddenStateSource):
    """`folder` is the finished `hidden_states` stage, whose manifest says which layers were probed, and
    through which storage states go although they are not stored."""

    def __init__(self, folder: Path, layers: Sequence[int], target: Target, engine: TargetEngine) -> None:
        manifest = Manifest.read(folder)
        manifest.require(folder, layers=layers, target=target.identity, template=target.template_hash)
        self.codec = Codec.of(manifest, layers)
        self.stack = ExitStack()
        self.engine = self.stack.enter_context(engine.load(target.folder, target.end_ids))

    @property
    def ahead(self) -> int:
        return self.engine.in_flight

    def get(self, sample: Sample) -> HiddenStates:
        return self.codec.roundtrip(self.ask(sample), sample.loss_mask)

    def ask(self, sample: Sample) -> HiddenStates:
        """What the engine gives, before it goes through the storage."""
        states = next(iter(self.engine.hidden_states([sample.tokens], self.codec.layers)))
        self.codec.check(sample, states)
        return states

    def give_up(self) -> None:
        self.stack.close()

    def close(self) -> None:
        self.stack.close()
