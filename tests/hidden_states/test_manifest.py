"""The manifest of stored hidden states: what no reader may mistake, each in one sentence."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.reader import ShardReader

GOOD = Manifest("target-id", "template-id", [1, 3], 8, "bfloat16", "native", "supervised", "tests 1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    GOOD.write(tmp_path)
    return tmp_path


def test_it_comes_back_as_it_was_written(folder: Path) -> None:
    assert Manifest.read(folder) == GOOD
    assert [path.name for path in folder.iterdir()] == ["manifest.json"], "nothing beside it is left"
    content = json.loads(Manifest.path(folder).read_text())
    assert content["format"] == 2 and "0 = embeddings" in content["layer_convention"]
    assert "before the final norm" in content["last_convention"]


def test_it_is_written_once(folder: Path) -> None:
    before = Manifest.path(folder).stat()
    replace(GOOD, engine="tests 2.0").write(folder)  # a newer release goes on with the same folder
    assert Manifest.path(folder).stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(UserError, match="another target: expected other, found target-id"):
        replace(GOOD, target="other").write(folder)
    assert Manifest.read(folder) == GOOD


@pytest.mark.parametrize(("changes", "said"), [
    ({"target": "new"}, "of another target: expected new, found target-id"),
    ({"template": "new"}, "of another chat template: expected new, found template-id"),
    ({"dtype": "float32"}, "of another dtype: expected float32, found bfloat16"),
    ({"storage": "float8_e4m3fn"}, "of another storage: expected float8_e4m3fn, found native"),
    ({"last_rows": "all"}, "of another choice of rows of the last state: expected all, found supervised"),
    ({"hidden_size": 9}, "of another hidden size: expected 9, found 8"),
    ({"alignment": 64}, "of another alignment: expected 64, found 4096")])
def test_another_fact_is_named_with_both_values(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^{Manifest.path(folder)} holds hidden states {said}; remove "
                                        f"{folder} and run the stage hidden_states again$"):
        GOOD.require(folder, **changes)
    GOOD.require(folder, **{name: getattr(GOOD, name) for name in changes})


@pytest.mark.parametrize(("layers", "missing"), [([0, 2], r"\[0, 2\]"), ([1, 2, 3], r"\[2\]"),
                                                 ([4], r"\[4\]")])
def test_other_layers_are_named_with_both_lists(folder: Path, layers: list[int], missing: str) -> None:
    """Also where their number is the same."""
    listed = str(layers).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UserError, match=rf"drafter reads layers {listed} but the hidden states hold layers "
                                        rf"\[1, 3\] \({Manifest.path(folder)}\), so {missing} are missing"):
        GOOD.require(folder, layers=layers)
    for fine in ([1, 3], [3], (3, 1), []):
        GOOD.require(folder, layers=fine)


def test_a_last_state_that_was_not_kept_cannot_be_read(folder: Path) -> None:
    GOOD.require(folder, last=True)
    bare = replace(GOOD, last_rows="none")
    bare.require(folder, last=False)
    with pytest.raises(UserError, match="reads the target's last state but .*manifest.json says "
                                        "last_rows=none"):
        bare.require(folder, last=True)


SPOILT = {
    "gone": (None, "is missing or not readable"),
    "torn": ('{"format": 2, "target"', "is missing or not readable"),
    "no object": ("[1]", "expected a JSON object, found list"),
    "format 1": ({"format": 1}, "is of format 1, expected format 2: other formats are not read; remove"),
    "a newer format": ({"format": 3}, "is of format 3, expected format 2"),
    "no format": ({"format": ...}, "is of format None, expected format 2"),
    "a key too few": ({"engine": ...}, r"missing \['engine'\], unknown \[\]"),
    "a key too many": ({"extra": 1}, r"missing \[\], unknown \['extra'\]"),
    "other layers": ({"layer_convention": "0-based layer index"},
                     "another layer_convention: expected 'residual stream .*', found '0-based layer index'"),
    "a normed last": ({"last_convention": "after the final norm"},
                      "another last_convention: expected 'after all layers, before the final norm', found "
                      "'after the final norm'"),
    "dtype": ({"dtype": "int8"}, "says dtype 'int8', expected one of float32, bfloat16, float16"),
    "storage": ({"storage": "zip"}, "says storage 'zip', expected one of native, float8_e4m3fn"),
    "last_rows": ({"last_rows": "some"}, "says last_rows 'some', expected one of supervised, all, none"),
    "descending layers": ({"tap_layers": [3, 1]}, r"says tap_layers \[3, 1\], expected ascending layer ids"),
    "layers by name": ({"tap_layers": ["a"]}, r"says tap_layers \['a'\], expected ascending layer ids"),
    "hidden size": ({"hidden_size": 0}, "says hidden_size 0, expected a positive multiple of 1"),
    "alignment": ({"alignment": 100}, "says alignment 100, expected a positive multiple of 64"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_manifest_that_is_none_is_named(folder: Path, case: str) -> None:
    content, said = SPOILT[case]
    path = Manifest.path(folder)
    path.unlink()
    if isinstance(content, dict):
        changed = asdict(GOOD) | content
        content = json.dumps({name: value for name, value in changed.items() if value is not ...})
    if content is not None:
        path.write_text(content)
    for reading in (Manifest.read, ShardReader):
        with pytest.raises(UserError, match=f"^{path} .*{said}"):
            reading(folder)


def test_a_cache_of_format_one_is_to_be_extracted_again(tmp_path: Path) -> None:
    """As the first release wrote it."""
    old = {"target": "t", "template": "t", "tap_layers": [1, 3], "dtype": "bfloat16", "tokens": 26,
           "samples": {"s0": [0, 0, 9]}, "shards": [], "layer_convention": "residual stream after L decoder "
           "layers; 0 = embeddings", "last_convention": "after all layers, before the final norm",
           "format": 1}
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=f"is of format 1, expected format 2: .*; remove {tmp_path} and "
                                        "run the stage hidden_states again"):
        Manifest.read(tmp_path)
