"""`tools/convert.py` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import small, uneven
from tool_calls import Call, caller

from trainer.export.base import Serving
from trainer.export.formats import LAYOUTS
from trainer.target import Target


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller("convert", monkeypatch, capsys)


@pytest.fixture
def native(tiny_target: Target, tmp_path: Path) -> Path:
    drafter = uneven(small(tiny_target, "dflash", draft_vocab_size=None))
    serving = Serving("t", [], 2, tiny_target.folder)
    LAYOUTS["native"].write(tmp_path / "native", drafter.export(), serving, torch.bfloat16)
    return tmp_path / "native"


def test_a_folder_is_converted_and_told(call: Any, native: Path, tiny_target: Target, tmp_path: Path) -> None:
    status, out, err = call(native, tmp_path / "new", "--format", "sglang", "--target", tiny_target.folder,
                            "--target-name", "org/target", "--max-context", "4096")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "dflash, 25 tensors, as sglang: for SGLang, and for vLLM"
    table = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.startswith("  ")}
    assert table["layers"] == ["3", "2"] and table["head_dim"][-1] == "16"
    assert table["vocab_size"] == ["320", "320"] and table["max_position_embeddings"] == ["2048", "4096"]
    assert "yarn" in out and "after layers" in out and "no, within a block" in out
    assert any(line.startswith("sglang: python -m sglang.launch_server --model-path org/target")
               for line in lines)
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["num_target_layers"] == 3 and config["max_position_embeddings"] == 4096


def test_what_does_not_fit_is_one_sentence(call: Any, native: Path, tmp_path: Path) -> None:
    new = tmp_path / "a"
    for arguments, text in [((native, new, "--format", "zlab", "--target", "t"), "or --target-layers"),
                            ((tmp_path / "no", new, "--format", "native"), "No such file"),
                            ((native, new, "--format", "native", "--set", "x"), "--set x cannot"),
                            ((native, new, "--format", "native", "--set", "y=1"), "'y' is not a key"),
                            ((native, native, "--format", "native"), "is there already")]:
        status, out, err = call(*arguments)
        assert (status, out) == (2, "") and text in err and len(err.splitlines()) == 1, err
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "_"} == {"native"}
