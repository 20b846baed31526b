"""A tiny random target, made once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import torch
from disks import mounted
from hypothesis import settings

from trainer.target import Target
from trainer.target_made import Kept, RandomGemma4, RandomLlama

settings.register_profile("patient", deadline=None)  # how long an example takes is up to the machine
settings.load_profile("patient")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    source = RandomLlama(hidden_size=64, layers=3, heads=4, key_value_heads=2, intermediate_size=128,
                         vocab_size=320, tied=True, seed=7, scale=0.2,
                         runtime=Kept(str(tmp_path_factory.mktemp("cache"))))
    return Target("tiny", source, "<|mask|>", [1, 2], {}, 512, False)


@pytest.fixture(scope="session")
def tiny_gemma4(tmp_path_factory: pytest.TempPathFactory) -> Target:
    source = RandomGemma4(hidden_size=64, kinds=["sliding_attention", "full_attention"] * 2, heads=4,
                          key_value_heads=2, head_dim=32, global_head_dim=64, window=16,
                          intermediate_size=128, vocab_size=320, seed=7, scale=0.2,
                          runtime=Kept(str(tmp_path_factory.mktemp("cache"))))
    return Target("tiny-gemma4", source, "<|mask|>", [2, 4], {}, 512, False)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser here ({', '.join(browser.NAMES)}): the pages were not opened in one")
    with browser.started(program, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="session")
def project() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder
