"""Whole checksums of a trained module and of the target's weights, kept beside the module in checksums.json.

A target's identity reads a part of each file, since every run asks for it: values that were changed in place
may lie between its pages. Here every byte is read, once where the module is exported, when training is over,
and again where it is put into a target.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer import _folders
from trainer.errors import UserError
from trainer.progress import Progress
from trainer.target_head import tensor_names

FILE, OWN = "checksums.json", "model.safetensors"
PIECE = 1 << 23  # bytes that are read at once


@dataclass(frozen=True)
class Sum:
    """Of a file: its bytes, and their SHA-256 in hex."""

    bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.bytes} bytes of sha256 {self.sha256}"


Sums = dict[str, Sum]  # by the name of the file


def write_checksums(changes: Path, target: Path) -> None:
    """Reads the tensors in `changes` and all weights of the `target`, and writes down what they are."""
    parts = {"changes": {OWN: changes / OWN}, "target": _weights(target)}
    content = {part: {name: asdict(found) for name, found in _sums(files, f"checksums of the {part}").items()}
               for part, files in parts.items()}
    _folders.write_json(changes / FILE, content)


def read_checksums(changes: Path, again: str) -> tuple[Sums, Sums] | None:
    """Those of the tensors and those of the target's weights; None where the folder has none, as those of
    earlier versions. UserError, which ends with `again`, for a damaged file."""
    path = changes / FILE
    if not path.is_file():
        return None
    content = _folders.read_object(path, again)
    try:
        own, target = ({name: _sum(each) for name, each in content[part].items()}
                       for part in ("changes", "target"))
        if own.keys() != {OWN} or not target:
            raise ValueError(f"it names {len(own)} files of the module and {len(target)} of the target")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} has no checksums of {OWN} and of the target's weights "
                        f"({type(error).__name__}: {error}); {again}") from error
    return own, target


def require_own(changes: Path, known: Sums, remedy: str) -> None:
    """Raises unless the tensors in `changes` are those that were exported."""
    _require({OWN: changes / OWN}, known, "checksums of the changes", "as it was exported", remedy)


def require_weights(target: Path, known: Sums, remedy: str) -> None:
    """Raises unless the files of the target's weights are those that the module was trained for."""
    files = _weights(target)
    if other := sorted(known.keys() ^ files.keys()):
        raise UserError(f"{target} is not the target that the module was trained for: expected weights in "
                        f"{', '.join(sorted(known)[:3])}, found them in {', '.join(sorted(files)[:3])} "
                        f"(other: {', '.join(other[:3])}); {remedy}")
    _require(files, known, "checksums of the target", "the file that the module was trained for", remedy)


def _require(files: dict[str, Path], known: Sums, label: str, what: str, remedy: str) -> None:
    """Sizes first, which cost nothing."""
    for name, path in files.items():
        size = path.stat().st_size
        if size != known[name].bytes:
            raise UserError(f"{path} is not {what}: expected {known[name]}, found {size} bytes; {remedy}")
    for name, found in _sums(files, label).items():
        if found != known[name]:
            raise UserError(f"{files[name]} is not {what}: expected {known[name]}, found {found}; {remedy}")


def _weights(target: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted({*tensor_names(target).values()})}


def _sums(files: dict[str, Path], label: str) -> Sums:
    found = {}
    with Progress(label, total=sum(_kib(path.stat().st_size) for path in files.values()), unit="KiB") as bar:
        for name, path in files.items():
            digest, size = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
                    size += len(piece)
                    bar.advance(_kib(len(piece)), file=name)
            found[name] = Sum(size, digest.hexdigest())
    return found


def _kib(count: int) -> int:
    return -(-count // 1024)


def _sum(content: Any) -> Sum:
    found = Sum(**content)
    if type(found.bytes) is not int or type(found.sha256) is not str:
        raise ValueError(f"bytes {found.bytes!r} and sha256 {found.sha256!r}")
    return found
