"""The file format of stored hidden states: a few safetensors shards and a manifest that is written last.

A shard holds whole samples, one after the other: `tokens` [rows] int64, `taps` [rows, layers * hidden] and
`last` [rows, hidden]. Which samples go into which shard depends on the samples alone, each shard appears by a
rename, so a killed extraction goes on with the first missing shard. Reading maps the file and copies once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.records import HiddenStates, Sample


def plan(samples: Sequence[Sample], shard_tokens: int) -> list[list[Sample]]:
    """Samples in order, cut into shards of at most `shard_tokens` tokens (a longer sample gets its own)."""
    shards: list[list[Sample]] = []
    room = 0
    for sample in samples:
        if not shards or len(sample.tokens) > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(sample)
        room -= len(sample.tokens)
    return shards


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, samples: Sequence[Sample], states: Sequence[HiddenStates]) -> None:
    tensors = {"tokens": torch.cat([torch.tensor(sample.tokens) for sample in samples]),
               "taps": torch.cat([state.taps for state in states]),
               "last": torch.cat([state.last for state in states])}
    path = shard_path(folder, number)
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # else a power cut may leave the name without its bytes
    partial.rename(path)


def describe_shards(folder: Path, planned: Sequence[Sequence[Sample]]) -> tuple[dict[str, list[int]],
                                                                               list[dict[str, Any]]]:
    """The manifest's `samples` and `shards` for shards that all exist."""
    where: dict[str, list[int]] = {}
    shards = []
    for number, samples in enumerate(planned):
        row = 0
        for sample in samples:
            where[sample.id] = [number, row, len(sample.tokens)]
            row += len(sample.tokens)
        path = shard_path(folder, number)
        shards.append({"name": path.name, "rows": row, "sha256": _sha256(path)})
    return where, shards


class ShardReader:
    """Random access by sample; names the file when a shard is missing, damaged, or of other tokens. A shard's
    checksum is compared when it is first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._open: dict[int, Any] = {}

    def get(self, sample: Sample) -> HiddenStates:
        if sample.id not in self.manifest.samples:
            raise UserError(f"{self.folder} has no hidden states of sample {sample.id}; remove the folder "
                            "and extract again")
        number, start, rows = self.manifest.samples[sample.id]
        path = shard_path(self.folder, number)
        try:
            file = self._file(number)
            tokens = file.get_slice("tokens")[start:start + rows]
            taps = file.get_slice("taps")[start:start + rows]
            last = file.get_slice("last")[start:start + rows]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is missing or torn ({error}); remove {self.folder} and extract "
                            "again") from error
        if tokens.tolist() != list(sample.tokens):
            raise UserError(f"{path} holds other tokens than sample {sample.id}; remove {self.folder} and "
                            "extract again")
        return HiddenStates(taps, last)

    def close(self) -> None:
        self._open.clear()

    def _file(self, number: int) -> Any:
        if number not in self._open:
            path = shard_path(self.folder, number)
            if _sha256(path) != self.manifest.shards[number]["sha256"]:
                raise UserError(f"{path} is damaged (its checksum differs from the manifest's); remove "
                                f"{self.folder} and extract again")
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]


def bad_rows(state: HiddenStates) -> int:
    """Rows of which any layer is all zero, or holds NaN or infinity."""
    layers = torch.cat([state.taps, state.last], dim=-1).float().unflatten(-1, (-1, state.last.shape[-1]))
    bad = ~torch.isfinite(layers).all(-1) | (layers == 0).all(-1)
    return int(bad.any(-1).sum())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
