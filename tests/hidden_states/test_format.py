"""The bytes on the disk belong to the number of their format: an older folder must say that it is older, and
not that it is of other samples, or damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from stored_states import contents

from trainer.hidden_states.base import FORMAT, Manifest
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates, Sample

PINNED = {  # format -> storage -> SHA-256 of the folder below; a new format gets a line of its own
    2: {"native": "98fdc994809259f0a695965cfdbd85dbab5595b2dad17f309e5a97c99b968dbb",
        "float8_e4m3fn": "a44be441883885c868c922ac0a53080fbd71f99b8cad1d3e29beaf3fa38e3def"},
}
SAMPLES = [Sample("maths-1#0", (5, 6, 7, 300, 301), (False, False, True, True, True)),
           Sample("ünïcode#1", tuple(range(40)), tuple(place % 3 > 0 for place in range(40)))]


def states(sample: Sample) -> HiddenStates:
    """Exact in bfloat16 and without a random draw, so that no version of a library decides them."""
    rows = len(sample.tokens)
    numbers = (torch.arange(rows * 48) * 37 % 251 - 125).view(rows, 48).bfloat16()
    return HiddenStates(numbers[:, :32], numbers[:, 32:])


@pytest.mark.parametrize("storage", PINNED[FORMAT])
def test_other_bytes_need_another_number(tmp_path: Path, storage: str) -> None:
    manifest = Manifest("target", "template", [1, 3], 16, "bfloat16", storage, "supervised", "tests")
    with ShardWriter(tmp_path, manifest, 1 << 20) as writer:
        for sample in SAMPLES:
            writer.append(sample, states(sample))
    found = hashlib.sha256()
    for name, content in contents(tmp_path).items():
        found.update(f"{name} {len(content)}\n".encode() + content)
    assert found.hexdigest() == PINNED[FORMAT][storage], \
        "what is written has changed: raise FORMAT in trainer/hidden_states/base.py and pin its bytes here"
