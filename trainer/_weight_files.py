"""Files of weights that people hand over: safetensors alone, and none outside of their folder.

Opening a pickle runs code that whoever wrote it chose, so none is ever opened. An index that named a file
elsewhere would have any file of this machine read, or linked into what is exported.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from trainer._folders import read_object
from trainer.errors import UserError

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CONVERT = "only safetensors is read, so convert them with save_pretrained(safe_serialization=True)"


def indexed(index: Path, remedy: str) -> dict[str, str]:
    """The name of the file beside the `index` that holds each tensor; raises a sentence, which ends with
    `remedy`, unless the index says so."""
    places = read_object(index, remedy).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index} is not an index of shards (it has no weight_map of file names); {remedy}")
    for tensor, name in places.items():
        if not _plain(name):
            raise UserError(f"{index} says that {tensor} lies in {name!r}, expected the name of a "
                            f"safetensors file beside it: no other file is read; {remedy}")
    return places


def pickles(folder: Path) -> str:
    """The pickle files below `folder`, for a message; "" without any."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")
                   if path.suffix in PICKLES)
    return ", ".join([*found[:3], *(["..."] if found[3:] else [])])


def _plain(name: str) -> bool:
    return name == PurePosixPath(name).name and name.endswith(".safetensors") and not {"\\", "\0"} & {*name}
