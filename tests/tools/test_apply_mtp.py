"""`tools/apply_mtp.py`: the same folder as the export's own, and one sentence for what does not fit."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import copied, small, uneven

from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.progress import exit_status
from trainer.target import Target

TOOL = Path(__file__).parents[2] / "tools/apply_mtp.py"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls it as from a shell, in this process: status, output, errors."""
    spec = importlib.util.spec_from_file_location("apply_mtp", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
        capsys.readouterr()  # of fixtures
        return exit_status(tool.main, goes_on=True), *capsys.readouterr()

    return called


@pytest.fixture
def changes(tiny_target: Target, tmp_path: Path) -> Path:
    """As the stage leaves it; beside it lies the stitched folder of the same drafter."""
    exported, serving = uneven(small(tiny_target, "mtp")).export(), Serving("t", [], 2, tiny_target.folder)
    for form in ("changes", "stitched"):
        FORMATS[form].write(tmp_path / form, exported, serving, torch.bfloat16)
    (tmp_path / "changes/speculator.json").write_text(json.dumps({"target_identity": tiny_target.identity}))
    return tmp_path / "changes"


def test_the_folder_is_that_of_the_export(call: Any, changes: Path, tiny_target: Target,
                                          tmp_path: Path) -> None:
    status, out, err = call(changes, tiny_target.folder, tmp_path / "whole")
    assert (status, err) == (0, "")
    assert out.startswith(f"serve it: vllm serve {tmp_path / 'whole'} --speculative-config ")
    names = {path.name for path in (tmp_path / "stitched").iterdir()}
    assert {path.name for path in (tmp_path / "whole").iterdir()} == names
    for name in names - {"mtp.json"}:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stitched" / name).read_bytes()


def test_what_does_not_fit_is_one_sentence(call: Any, changes: Path, tiny_target: Target,
                                           tmp_path: Path) -> None:
    other = copied(tiny_target, tmp_path / "other", generation_config={"temperature": 0.5})
    wide = copied(tiny_target, tmp_path / "wide", config={"num_attention_heads": 2})
    coarse = copied(tiny_target, tmp_path / "coarse", config={"quantization_config": {"quant_method": "awq"}})
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "b.partial").mkdir()
    shutil.copytree(tiny_target.folder, tmp_path / "taken")
    torn = shutil.copytree(changes, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:200])
    lost = shutil.copytree(changes, tmp_path / "lost")
    (lost / "model.safetensors").unlink()
    for arguments, text in (((empty, tiny_target.folder, tmp_path / "a"), "empty is no folder of changes"),
                            ((tiny_target.folder, tiny_target.folder, tmp_path / "a"), "of something else"),
                            ((torn, tiny_target.folder, tmp_path / "a"), "torn is no folder of changes"),
                            ((lost, tiny_target.folder, tmp_path / "a"), "lost is no folder of changes"),
                            ((changes, empty, tmp_path / "a"), "has no config.json"),
                            ((changes, tiny_target.folder, tmp_path / "b"), "b.partial is there already"),
                            ((changes, coarse.folder, tmp_path / "a", "--other-weights"),
                             "weights are quantised (quantization_config in its config.json: awq)"),
                            ((changes, tiny_target.folder, tmp_path / "taken"), "is there already"),
                            ((changes, wide.folder, tmp_path / "a"), "has num_attention_heads 2, and"),
                            ((changes, other.folder, tmp_path / "a"), "say --other-weights")):
        status, out, err = call(*arguments)
        assert (status, out) == (2, "") and text in err and len(err.splitlines()) == 1
        assert not {"a", "a.partial", "b"} & {path.name for path in tmp_path.iterdir()}
    assert call(changes, other.folder, tmp_path / "a", "--other-weights")[0] == 0
