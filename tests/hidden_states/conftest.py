"""Caches that the stage made with the transformers engine on the tiny target, to be read and spoilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stored_states import LAYERS, SMALL_SHARD, STORAGES, contents, extract, make
from written_states import SAMPLES, append_all, check

from trainer.hidden_states.shards import shard_numbers
from trainer.target import Target


@pytest.fixture(scope="session")
def made(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One cache a storage, by the transformers engine: several shards, several samples in some."""
    folders = {storage: tmp_path_factory.mktemp("made") / "states" for storage in STORAGES}
    for storage, folder in folders.items():
        extract(make("offline", tiny_target, LAYERS, storage=storage, runtime={"shard_gib": SMALL_SHARD}),
                folder)
    return folders


@pytest.fixture
def cache(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["native"], tmp_path / "cache"))


@pytest.fixture(params=STORAGES)
def either(made: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(made[request.param], tmp_path / "cache"))


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What lies in the folder of a writer that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    append_all(folder)
    check(folder, SAMPLES)
    assert len(shard_numbers(folder)) >= 3, "the tests below cross from shard to shard"
    return contents(folder)
