"""The programs in tools/, in this process: as modules, and called as from a shell."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trainer.progress import exit_status

TOOLS = Path(__file__).parents[1] / "tools"
Call = Callable[..., tuple[int, str, str]]


def loaded(name: str) -> ModuleType:
    """A fresh module of tools/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caller(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a tool with arguments: status, output, errors."""
    module = loaded(name)

    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOLS / f"{name}.py"), *map(str, arguments)])
        capsys.readouterr()  # of fixtures
        return exit_status(module.main, goes_on=True), *capsys.readouterr()

    return called
