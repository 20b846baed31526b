"""A small cache of random states, written in the same way by every test that writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stored_states import equal, random_states
from tiny import random_samples

from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.writer import ShardWriter
from trainer.records import Sample

MANIFEST = Manifest("target", "template", [1, 3], 16, "bfloat16", "native", "supervised", "tests")
CODEC = Codec.of(MANIFEST)
SAMPLES = random_samples((30, 9, 55, 41, 12, 60, 28, 33, 7, 19, 44, 25), prompt=4)
SHARD_BYTES = 20_000
MANY = random_samples([17 + number % 23 for number in range(90)], prompt=4, seed=5)


def append_all(folder: Path, samples: Sequence[Sample] = SAMPLES, every: int = 3,
               log: Path | None = None) -> None:
    """Stores those that are missing, as the stage does; `log` gets the ids of what was committed."""
    with ShardWriter(folder, MANIFEST, SHARD_BYTES) as made:
        waiting = []
        for sample in samples:
            if made.has(sample.id):
                continue
            made.append(sample, random_states(CODEC, sample))
            waiting.append(sample.id)
            if len(waiting) == every or sample is samples[-1]:
                made.commit()
                if log is not None:
                    with log.open("a") as file:
                        file.write("".join(f"{each}\n" for each in waiting))
                waiting = []


def check(folder: Path, samples: Sequence[Sample]) -> None:
    reader = ShardReader(folder, verify="always")
    for sample in samples:
        assert equal(reader.get(sample), CODEC.roundtrip(random_states(CODEC, sample), sample.loss_mask))
