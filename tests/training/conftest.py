"""A target of one's own and finished stages, for each file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import copied, finished_inputs
from trainings import SAMPLES

from trainer.target import Target


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target")


@pytest.fixture(scope="module")
def inputs(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return finished_inputs(target, tmp_path_factory.mktemp("inputs"), SAMPLES, heldout=3)
