"""Hidden states from the shards of a finished extraction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer.hidden_states.base import HiddenStateSource
from trainer.hidden_states.reader import ShardReader, Verify
from trainer.ranges import Amount
from trainer.records import HiddenStates, Sample


@dataclass(frozen=True)
class OfflineRuntime:
    """`verify` says when checksums are compared; `ahead` rows are read while training goes on."""

    verify: Verify
    ahead: Amount


class Offline(HiddenStateSource):
    """The states after `layers`, from a folder that holds these and maybe more; the others are not read."""

    shared: ClassVar[bool] = True

    def __init__(self, folder: Path, layers: Sequence[int], runtime: OfflineRuntime) -> None:
        self.reader = ShardReader(folder, layers, runtime.verify)
        self._ahead = runtime.ahead

    @property
    def ahead(self) -> int:
        return self._ahead

    def get(self, sample: Sample) -> HiddenStates:
        return self.reader.get(sample)

    def give_up(self) -> None:
        """Reading ends soon by itself, and must end before `close`."""

    def close(self) -> None:
        self.reader.close()
