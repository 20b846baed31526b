"""What the golden tests of drafters share: a target whose norms all differ, and one packed row of states."""

from __future__ import annotations

import pytest
from slow_decoder import SAMPLES
from tiny import copied, states_of, uneven_norms

from trainer.data.packing import collate
from trainer.records import Batch
from trainer.target import Target


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target", uneven_norms)


@pytest.fixture(scope="module")
def batch(target: Target) -> Batch:
    return collate(SAMPLES, states_of(target, SAMPLES, [1, 2]), seed=11, device="cpu", tokens=70)
