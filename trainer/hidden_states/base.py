"""The promise of a source of hidden states, and what both kinds of storage say about themselves."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.records import HiddenStates, Sample


class HiddenStateSource(ABC):
    """Gives the hidden states of one sample. Every source gives equal tensors for equal samples."""

    @abstractmethod
    def get(self, sample: Sample) -> HiddenStates: ...

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class Manifest:
    """What a folder of hidden states holds, by name, so that no reader mistakes its conventions."""

    target: str            # identity of the target
    template: str          # hash of chat template and its arguments
    tap_layers: list[int]  # "after L layers", ascending
    dtype: str
    tokens: int
    samples: dict[str, list[int]]  # id -> shard, first row, rows; empty when nothing is stored
    shards: list[dict[str, Any]]   # name, rows, sha256
    layer_convention: str = "residual stream after L decoder layers; 0 = embeddings"
    last_convention: str = "after all layers, before the final norm"
    format: int = 1

    def write(self, folder: Path) -> None:
        (folder / "manifest.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / "manifest.json"
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError, TypeError) as error:
            raise UserError(f"{path} is missing or not readable ({error}); remove {folder} and run the stage "
                            f"hidden_states again") from error

    def require(self, tap_layers: tuple[int, ...]) -> None:
        """Raises unless the stored states are those that a drafter reads."""
        if tuple(self.tap_layers) != tuple(tap_layers):
            raise UserError(f"the drafter reads layers {list(tap_layers)} but the hidden states hold layers "
                            f"{self.tap_layers}; set both from target.tap_layers and extract again")
