"""Hidden states from the shards of a finished extraction."""

from __future__ import annotations

from pathlib import Path

from trainer.hidden_states.base import HiddenStateSource
from trainer.hidden_states.shards import ShardReader
from trainer.records import HiddenStates, Sample


class Offline(HiddenStateSource):
    def __init__(self, folder: Path) -> None:
        self.reader = ShardReader(folder)

    def get(self, sample: Sample) -> HiddenStates:
        return self.reader.get(sample)

    def close(self) -> None:
        self.reader.close()
