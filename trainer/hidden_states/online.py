"""Hidden states asked from the target while training; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import torch

from trainer.engines.base import TargetEngine
from trainer.hidden_states.base import HiddenStateSource, Manifest
from trainer.hidden_states.codec import Codec
from trainer.records import HiddenStates, Sample, Tap, stored
from trainer.target import Target


class Online(HiddenStateSource):
    """`folder` is the finished `hidden_states` stage, whose manifest says which layers were probed, and
    through which storage states go although they are not stored. Taps that are no layer ids go through none,
    and lie behind the others."""

    every_tap: ClassVar[bool] = True

    def __init__(self, folder: Path, layers: Sequence[Tap], target: Target, engine: TargetEngine) -> None:
        manifest = Manifest.read(folder)
        manifest.require(folder, layers=stored(layers), target=target.identity, template=target.template_hash)
        self.codec = Codec.of(manifest, stored(layers))
        self.taps = (*self.codec.layers, *(tap for tap in layers if not isinstance(tap, int)))
        self.stack = ExitStack()
        self.engine = self.stack.enter_context(engine.load(target.folder, target.end_ids))

    @property
    def ahead(self) -> int:
        return self.engine.in_flight

    def get(self, sample: Sample) -> HiddenStates:
        states = self.ask(sample)
        passed = self.codec.roundtrip(self._layers(states), sample.loss_mask)
        if len(self.taps) == len(self.codec.layers):
            return passed
        return HiddenStates(torch.cat([passed.taps, states.taps[:, passed.taps.shape[1]:]], dim=-1),
                            passed.last)

    def ask(self, sample: Sample) -> HiddenStates:
        """What the engine gives, before it goes through the storage."""
        states = next(iter(self.engine.hidden_states([sample.tokens], self.taps)))
        self.codec.check(sample, self._layers(states))
        return states

    def _layers(self, states: HiddenStates) -> HiddenStates:
        """Without the taps that are no layer ids."""
        if len(self.taps) == len(self.codec.layers):
            return states
        return HiddenStates(states.taps[:, :len(self.codec.layers) * self.codec.hidden], states.last)

    def give_up(self) -> None:
        self.stack.close()

    def close(self) -> None:
        self.stack.close()
