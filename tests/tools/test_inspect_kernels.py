"""Kernels compiled ahead of time for devices that are not here: what is spilled, and how rows are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

pytest.importorskip("triton", reason="there is no triton for this system") \
    if not sys.platform.startswith("linux") else None

import inspect_kernels  # noqa: E402

HALF, ALL = (torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32)
# Scalar registers that AMD's compiler moves to lanes of vector registers, at most: of the kernels that read
# what drafts were drawn from. Nothing else may spill.
SPILLS = {"emit full one by one": 36, "emit full block": 48, "emit reduced one by one": 46,
          "emit reduced block": 62}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run compiled is no answer."""
    monkeypatch.setattr(inspect_kernels.triton.knobs.cache, "dir", str(tmp_path))


def test_every_kind_of_step_has_its_kernels() -> None:
    names = [name for name, _ in inspect_kernels.variants(ALL)]
    assert len(names) == len(set(names))
    for type_name in ("bf16", "fp16", "fp32"):
        here = [name for name in names if name.endswith(type_name)]
        for drafts in ("one-hot", "full", "reduced"):
            for way in ("one by one", "block"):
                kind = "plain" if (drafts, way) == ("one-hot", "one by one") else f"{drafts} {way}"
                assert f"emit {kind} {type_name}" in here
        for kernel in ("best_of_blocks greedy", "note_blocks plain", "note_blocks filters",
                       "note_rows filters"):
            assert f"{kernel} {type_name}" in here


@pytest.mark.parametrize("types", [HALF, pytest.param(ALL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", inspect_kernels.TARGETS)
def test_nothing_goes_to_memory_and_rows_are_read_16_bytes_at_once(target: str, types: tuple[torch.dtype, ...]
                                                                   ) -> None:
    found = list(inspect_kernels.inspect([target], types))
    bounds = {f"{name} {type_name}": bound for name, bound in SPILLS.items()
              for type_name in inspect_kernels.FLOATS.values()} if target.startswith("gfx") else {}
    for each in found:
        assert each.scratch == 0 and each.spills == each.scalar and each.wide is not False, each
        if each.kernel in bounds:  # one that spills no more leaves the list
            assert 0 < each.spills <= bounds[each.kernel], each
        else:
            assert each.spills == 0, each
    assert all(0 < each.vgpr <= 256 for each in found)
    assert sum(each.wide is True for each in found) >= 8 * len(types)


def test_what_is_wrong_is_told() -> None:
    def found(**changed: int | bool) -> inspect_kernels.Found:
        made = {"kernel": "k", "target": "gfx942", "vgpr": 8, "spills": 0, "scratch": 0, "lds": 0}
        return inspect_kernels.Found(**made | {"wide": True} | changed)

    assert found().problem() is None and found(wide=None).problem() is None
    assert found(spills=3).problem() == "k on gfx942: 3 spilled"
    assert found(scratch=16, wide=False).problem() == "k on gfx942: 16 B of scratch, no load of 16 bytes"


def test_json_is_one_list_with_these_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                          ) -> None:
    arguments = ["inspect_kernels.py", "--json", "--target", "gfx942", "--type", "bf16", "--kernel",
                 "best_of"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert inspect_kernels.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [list(row) for row in rows] == [["kernel", "target", "vgpr", "spills", "scratch", "lds"]]
    assert rows[0]["kernel"] == "best_of_blocks greedy bf16" and rows[0]["target"] == "gfx942"
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "no such kernel"])
    assert inspect_kernels.main() == 1
