"""A Hub on the loopback for each test, and a finished export to put there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_support import TOKEN, Hub, export_for

from trainer.target import Target


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
    return export_for(tiny_target, tmp_path_factory.mktemp("exported"))
