"""The endless sequence of packed rows: row n is a function of (samples, seed, n) and of nothing that happened
before. So is a step, which is the next few rows of it, however many processes share them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from threading import Lock

from trainer.data.packing import collate, dealt, padding, plan_epoch, seed_of
from trainer.hidden_states.base import HiddenStateSource
from trainer.records import Batch, Sample


class Rows:
    """`row` may be called from several threads."""

    def __init__(self, samples: Sequence[Sample], source: HiddenStateSource, tokens: int, seed: int,
                 device: str) -> None:
        self.samples, self.source, self.tokens, self.seed, self.device = samples, source, tokens, seed, device
        self.lengths = [len(sample.tokens) for sample in samples]
        self._epochs: list[list[list[int]]] = []
        self._starts: list[int] = [0]
        self._planning = Lock()

    def count(self, epochs: int) -> int:
        """Rows in the first `epochs` epochs."""
        with self._planning:
            while len(self._epochs) < epochs:
                self._plan_next()
        return self._starts[epochs]

    def padding(self, epoch: int) -> float:
        """The share of the rows of an epoch that is padding."""
        self.count(epoch + 1)
        return padding(self._epochs[epoch], self.lengths, self.tokens)

    def load(self, number: int) -> int:
        """Tokens of samples in a row."""
        return sum(self.lengths[index] for index in self._indices(number))

    def dealt(self, step: int, rows: int, shares: int) -> list[list[int]]:
        """Numbers of the `rows` rows of a step, 0 for the first one, for each of the processes that share
        them: which rows these are does not depend on how many share them."""
        numbers = range(step * rows, (step + 1) * rows)
        return [[numbers[place] for place in share]
                for share in dealt([self.load(number) for number in numbers], shares)]

    def told(self, rows: int, shares: int) -> tuple[dict[str, float], str]:
        """For the record and for people: how well the rows of the first epoch are filled, and how evenly each
        step of `rows` of them is dealt to `shares` processes."""
        count = self.count(1)
        facts = {"rows_an_epoch": count, "padding": round(self.padding(0), 4)}
        said = (f"{len(self.samples)} samples in {count} rows of {self.tokens} tokens an epoch, "
                f"{facts['padding']:.1%} of them padding")
        if shares > 1:
            steps = [[sum(map(self.load, share)) for share in self.dealt(step, rows, shares)]
                     for step in range(max(1, count // rows))]
            facts["uneven"] = round(sum(max(loads) * shares / sum(loads) - 1 for loads in steps)
                                    / len(steps), 4)
            said += f"; of {shares} processes the fullest has {facts['uneven']:.1%} more than its share"
        return facts, said

    def row(self, number: int) -> Batch:
        samples = [self.samples[index] for index in self._indices(number)]
        states = [self.source.get(sample) for sample in samples]
        return collate(samples, states, seed_of(self.seed, "row", number), self.device, self.tokens)

    def _indices(self, number: int) -> list[int]:
        """The samples of a row."""
        with self._planning:
            while number >= self._starts[-1]:
                self._plan_next()
        epoch = bisect_right(self._starts, number) - 1
        return self._epochs[epoch][number - self._starts[epoch]]

    def _plan_next(self) -> None:
        plan = plan_epoch(self.lengths, self.tokens, self.seed, len(self._epochs))
        self._epochs.append(plan)
        self._starts.append(self._starts[-1] + len(plan))
