"""The log of a training run: wandb is asked before anything runs, and what it says is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.training.log import Log, require_wandb

SAID = "train.runtime.wandb_project=mine "


def test_wandb_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for ask in (lambda: require_wandb("mine"), lambda: Log(tmp_path / "log.jsonl", [], "mine")):
        with pytest.raises(UserError, match=f"^{SAID}needs the package wandb, which is not installed; "):
            ask()


@pytest.mark.parametrize(("mode", "said"), [("online", SAID), ("offline", "")])
def test_wandb_that_nobody_is_logged_in_to(tmp_path: Path, mode: str, said: str) -> None:
    """In a process of its own: wandb reads its environment once."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    code = ("from trainer.errors import UserError\nfrom trainer.training.log import require_wandb\n"
            "try:\n    require_wandb('mine')\nexcept UserError as error:\n    print('told:', error)")
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120,
                         stdin=subprocess.DEVNULL, cwd=tmp_path, check=True, env=plain | {
                             "HOME": str(tmp_path), "WANDB_MODE": mode, "NETRC": str(tmp_path / "none"),
                             "PYTHONPATH": str(Path(__file__).parents[2])})
    told = [line for line in run.stdout.splitlines() if line.startswith("told:")]
    assert len(told) == bool(said) and "Traceback" not in run.stderr, run.stdout + run.stderr
    assert not said or (told[0].startswith(f"told: {said}cannot be used: ") and "wandb login" in told[0])
