"""Formats of a drafter that lives inside its target, as MTP modules do.

`stitched` is the complete target with the trained tensors put back: a server needs nothing else. `changes`
has these tensors alone, a small folder for the Hub, which `tools/apply_mtp.py` puts into a target anywhere.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer._weight_files import INDEX
from trainer.architectures.base import Exported
from trainer.architectures.mtp_layouts import apart, layout_of
from trainer.architectures.mtp_module import promised_tensors
from trainer.architectures.tensors import differences
from trainer.cpu_build import CpuServer
from trainer.errors import UserError
from trainer.export.base import Format, Serving, in_dtype
from trainer.export.checksums import write_checksums
from trainer.export.serve_line import Place
from trainer.target import text_part
from trainer.target_head import read_tensors, tensor_names, tensor_shapes

RECORD, ADDED, WHOLE = "mtp.json", "model-mtp.safetensors", "model.safetensors"
KEPT = ("method", "steps", "config_changes")  # what both folders say of the module
SMALL = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")  # what a target has beside its weights
OWN = ("README.md", "speculator.json", "provenance.json", "made.json", "config.json", INDEX,
       RECORD)  # not taken from it


class Changes(Format):
    name = "changes"
    use = "the trained tensors alone, which tools/apply_mtp.py puts into the target"
    loaded = False
    title = "Module for {target}"
    about = ("The trained tensors of a drafter for speculative decoding that lives inside its target (an MTP "
             "module). No server loads this folder: `tools/apply_mtp.py` puts the tensors into a copy of the "
             "target, which is served in the target's place.")

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return {**exported.flavours[self.name], "target": serving.target, "target_config": exported.geometry}

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config["target_config"], config

    def seal(self, folder: Path, serving: Serving) -> None:
        assert serving.folder is not None, "the target's weights are read"
        write_checksums(folder, serving.folder)

    def commands(self, method: str, folder: Place, target: str, lengths: Mapping[str, Any],
                 cpu: CpuServer | None = None) -> dict[str, str]:
        source = target if Path(target).is_absolute() else "FOLDER_OF_THE_TARGET"
        words = ["python", "tools/apply_mtp.py", str(folder), source, "NEW_FOLDER"]
        return {"apply": shlex.join(words)} | Stitched().commands(method, "NEW_FOLDER", target, lengths, cpu)


class Stitched(Format):
    name = "stitched"
    use = "the complete target with the trained module inside"
    title = "{target} with a drafter inside"
    about = ("A whole model, and no drafter to be put beside one: all of the target, with a module for "
             "speculative decoding (MTP) inside. Serve this folder in place of the target. The model checks "
             "every token that its module drafts, so the text stays the target's own, and takes fewer of its "
             "steps.")

    def config(self, exported: Exported, serving: Serving) -> dict[str, Any]:
        return {**exported.flavours[self.name], "tensors": sorted(exported.weights)}

    def parse(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return config.get("text_config", config), config

    def served(self, folder: Place, target: Place) -> tuple[Place, Place | None]:
        return folder, None

    def write(self, folder: Path, exported: Exported, serving: Serving, dtype: torch.dtype) -> None:
        assert serving.folder is not None, "a stitched folder takes the files of its target"
        stitch(serving.folder, folder, in_dtype(exported, dtype), self.config(exported, serving))

    def read(self, folder: Path) -> Exported:
        found = super().read(folder)
        return Exported(found.weights, found.geometry, {self.name: json.loads((folder / RECORD).read_text())})

    def weights(self, folder: Path) -> dict[str, Tensor]:
        return read_tensors(folder, json.loads((folder / RECORD).read_text())["tensors"])


def stitch(target: Path, folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Writes into `folder` the complete `target` with these tensors in place of its own of the same names, or
    beside its own: shards that change, the index and config.json (with `record["config_changes"]`) are
    written anew, all other files are hard links, or copies on another disk. `record` is kept in mtp.json.
    Nothing in `target` is opened for writing; what `folder` has is removed. Raises UserError for tensors that
    are not the target's module."""
    require_module(target, tensors)
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed: its links lead into the target
    folder.mkdir(parents=True)
    places = tensor_names(target)
    added = {name: tensor for name, tensor in tensors.items() if name not in places}
    names, new = shard_names({path.name for path in places.values()}, bool(added))
    changed = {places[name] for name in tensors if name in places}
    for path in {*places.values()} - changed:
        link(path, folder / names[path.name])
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target)
        hidden = any(part.startswith(".") for part in name.parts)
        small = path.suffix in SMALL or path.name.startswith(("LICENSE", "NOTICE"))
        if path.is_file() and small and not hidden and str(name) not in OWN:
            link(path, folder / name)
    for path in changed:
        _rewrite(path, folder / names[path.name], tensors)
    if added:
        save_file(added, folder / new, metadata={"format": "pt"})
    if added or (target / INDEX).is_file():
        _write_index(target, folder, {name: names[path.name] for name, path in places.items()}
                     | dict.fromkeys(added, new))
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **record["config_changes"]}, indent=2) + "\n")
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def shard_names(files: Collection[str], more: bool) -> tuple[dict[str, str], str]:
    """What each of the target's `files` of weights is called in a stitched folder, and the file of tensors
    that are `more` than the target has. Where there is a model.safetensors, transformers reads that one alone
    and no index, so that beside others it gets another name, and all are numbered."""
    new = ADDED
    while new in files:
        new = f"more-{new}"
    every = [*sorted(files), *([new] if more else [])]
    if WHOLE not in files or len(every) == 1:
        return {name: name for name in files}, new
    numbered = {name: f"model-{place:05}-of-{len(every):05}.safetensors"
                for place, name in enumerate(every, 1)}
    return {name: numbered[name] for name in files}, numbered.get(new, new)


def require_module(target: Path, tensors: dict[str, Tensor]) -> None:
    """Raises UserError unless `tensors` are all of the MTP module that the config.json of the `target`
    promises, with finite values, and nothing else, and unless the module in its files, where it has one, is
    such a one, too."""
    config, places = text_part(json.loads((target / "config.json").read_text())), tensor_names(target)
    try:
        wanted = promised_tensors(config, apart(tensors))
        own = layout_of(config).own_names(places, config)
    except ValueError as error:
        raise UserError(f"{target} cannot take an MTP module: {error}") from error
    there = {"the trained": tensors} | ({"its own": tensor_shapes(target, own)} if own else {})
    for whose, found in there.items():
        if wrong := differences(wanted, found):
            raise UserError(f"{target} cannot take the MTP module: {len(wrong)} tensors of {whose} one are "
                            f"not what its config.json promises ({'; '.join(wrong[:3])}); take the target "
                            "that the module was trained for, or train and export the module again")


def link(source: Path, place: Path) -> None:
    """A hard link, or a copy where there can be none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a cache of the Hub has symbolic links
    try:
        os.link(source, place)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, place)


def _rewrite(source: Path, place: Path, tensors: dict[str, Tensor]) -> None:
    """The shard with some of its tensors replaced; the others keep their bytes."""
    with safe_open(source, framework="pt") as file:
        metadata, kept = file.metadata(), {}
        for name in file.keys():  # noqa: SIM118 - it is no dict
            kept[name] = file.get_tensor(name)
            if name in tensors:
                kept[name] = tensors[name]
    save_file(kept, place, metadata=metadata)


def _write_index(target: Path, folder: Path, places: dict[str, str]) -> None:
    path = target / INDEX
    index = json.loads(path.read_text()) if path.is_file() else {"metadata": {}}
    total = 0
    for file in sorted(set(places.values())):
        with (folder / file).open("rb") as shard:
            header = json.loads(shard.read(int.from_bytes(shard.read(8), "little")))
        total += sum(each["data_offsets"][1] - each["data_offsets"][0]
                     for name, each in header.items() if name != "__metadata__")
    known = index.get("metadata")
    index = {**index, "metadata": {**(known if isinstance(known, dict) else {}), "total_size": total},
             "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
