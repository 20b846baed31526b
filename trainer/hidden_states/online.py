"""Hidden states asked from the target while training; nothing is stored."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from trainer.engines.base import TargetEngine
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.records import HiddenStates, Sample
from trainer.target import Target


class Online(HiddenStateSource):
    """`folder` is the finished `hidden_states` stage, whose manifest says which layers were probed."""

    def __init__(self, folder: Path, target: Target, engine: TargetEngine) -> None:
        self.layers = Manifest.read(folder).tap_layers
        self.stack = ExitStack()
        self.engine = self.stack.enter_context(engine.load(target.folder, target.end_ids))

    def get(self, sample: Sample) -> HiddenStates:
        return next(self.engine.hidden_states([sample.tokens], self.layers))

    def close(self) -> None:
        self.stack.close()
