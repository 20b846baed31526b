"""The endless sequence of packed rows: row n is a function of (samples, seed, n) and of nothing that happened
before."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from trainer.data.packing import collate, plan_epoch, seed_of
from trainer.hidden_states.base import HiddenStateSource
from trainer.records import Batch, Sample


class Rows:
    """`row` may be called from several threads."""

    def __init__(self, samples: Sequence[Sample], source: HiddenStateSource, tokens: int, seed: int,
                 device: str) -> None:
        self.samples, self.source, self.tokens, self.seed, self.device = samples, source, tokens, seed, device
        self._epochs: list[list[list[int]]] = []
        self._starts: list[int] = [0]
        self._planning = Lock()

    def count(self, epochs: int) -> int:
        """Rows in the first `epochs` epochs."""
        with self._planning:
            while len(self._epochs) < epochs:
                self._plan_next()
        return self._starts[epochs]

    def row(self, number: int) -> Batch:
        with self._planning:
            while number >= self._starts[-1]:
                self._plan_next()
        epoch = next(index for index, start in enumerate(self._starts[1:]) if number < start)
        samples = [self.samples[index] for index in self._epochs[epoch][number - self._starts[epoch]]]
        states = [self.source.get(sample) for sample in samples]
        return collate(samples, states, seed_of(self.seed, "row", number), self.device, self.tokens)

    def _plan_next(self) -> None:
        lengths = [len(sample.tokens) for sample in self.samples]
        plan = plan_epoch(lengths, self.tokens, self.seed, len(self._epochs))
        self._epochs.append(plan)
        self._starts.append(self._starts[-1] + len(plan))
