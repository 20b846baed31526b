"""Files of weights: what an index may name, and pickles by name."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer._weight_files import indexed, pickles
from trainer.errors import UserError
from trainer.target_head import tensor_names

OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "sub/x.safetensors", "..", ".",
           "", "x.bin", "pytorch_model.bin", "..\\x.safetensors", "x\0.safetensors", "./x.safetensors"]


def index_of(folder: Path, places: object) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_nothing_but_files_beside_it(tmp_path: Path, name: str) -> None:
    index = index_of(tmp_path, {"good": "x.safetensors", "bad": name})
    for read in (lambda: indexed(index, "fetch it again"), lambda: tensor_names(tmp_path)):
        with pytest.raises(UserError) as told:
            read()
        assert str(told.value) == (f"{index} says that bad lies in {name!r}, expected the name of a "
                                   "safetensors file beside it: no other file is read; fetch it again")


@given(st.text(st.sampled_from("./\\ab \0"), max_size=12).map(lambda start: f"{start}.safetensors"))
def test_what_an_index_names_lies_in_its_folder(name: str) -> None:
    folder = Path(__file__).parent / "nowhere"
    try:
        path = folder / indexed_names({"a": name})["a"]
    except UserError:
        return
    assert path.parent == folder and (path.parent / path.name).resolve().parent == folder.resolve()


def indexed_names(places: dict[str, str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return indexed(index_of(Path(folder), places), "fetch it again")


@pytest.mark.parametrize("places", [None, [], {"a": 1}, {"a": None}, "x"])
def test_another_thing_is_no_index(tmp_path: Path, places: object) -> None:
    with pytest.raises(UserError, match="is not an index of shards .*; fetch it again$"):
        indexed(index_of(tmp_path, places), "fetch it again")


def test_pickles_are_named(tmp_path: Path) -> None:
    assert pickles(tmp_path) == pickles(tmp_path / "gone") == ""
    for name in ("a.bin", "b.pt", "config.json", "model.safetensors", "c.pth", "d.ckpt"):
        (tmp_path / name).touch()
    assert pickles(tmp_path) == "a.bin, b.pt, c.pth, ..."
