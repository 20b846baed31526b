"""A Hub on the loopback for each test, and a finished export to put there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_support import TOKEN, Hub, place
from safetensors.torch import save_file
from tiny import OFFLINE, dflash, finished_inputs, make_dflash, random_samples, uneven

from trainer.export.stage import Export
from trainer.target import Target
from trainer.training import checkpoint
from trainer.training.build import save_counts

SETTINGS = {"layers": 1, "block_size": 8}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server, which this process and those that it starts take for the Hub."""
    script = Path(__file__).with_name("hub_server.py")
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        settings = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN,
                    "HF_HOME": str(tmp_path / "home")}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name, value in {"ENDPOINT": url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False,
                            "HF_TOKEN_PATH": str(tmp_path / "home/token")}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                            url + "/{repo_id}/resolve/{revision}/{filename}")
        yield Hub(url, tmp_path / "downloads")
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def exported(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished stage export of a random drafter, for a target that is said to be published."""
    folder = tmp_path_factory.mktemp("exported")
    train, counts = folder / "train", torch.arange(320).flip(0)
    train.mkdir()
    save_counts(train, counts)
    save_file(checkpoint.trained(uneven(dflash(tiny_target, counts, **SETTINGS))),
              train / "weights.safetensors")
    inputs = {**finished_inputs(tiny_target, folder, random_samples((30, 22, 17)), heldout=0), "train": train}
    out = folder / "export"
    out.mkdir()
    Export(target=tiny_target, drafter=make_dflash(**SETTINGS), source=OFFLINE,
           formats=["speculators", "native"], dtype="bfloat16", default_k=3, target_name="org/target",
           trained_modes=["chat"], probe_rows=1, calibration_drafts=20, recipe="some_recipe",
           command='["train.epochs=2"]', hub=place()).run(inputs, out)
    return out
