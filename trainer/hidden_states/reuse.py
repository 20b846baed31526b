"""Stored hidden states that serve another run: the same target, template and samples, and all of its layers.

Links, not copies: a reader follows them, a moved `run_root` keeps those that lie inside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.index import index_path
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import shard_numbers, shard_path
from trainer.records import Sample

SHOWN = 3  # samples named in a complaint


def find(out: Path, wanted: Manifest, samples: Sequence[Sample]) -> Path | None:
    """A finished folder beside `out` with the wanted states of all `samples`, stored as they would be here.
    None where `out` itself was begun already."""
    if Manifest.path(out).exists():
        return None
    for folder in sorted(out.parent.iterdir()):
        if not (folder / "stage.json").is_file() or folder.suffix == ".partial":
            continue
        try:
            other = Manifest.read(folder)
        except UserError:  # of an older format, or damaged: whoever reads it is told so
            continue
        same = ("target", "template", "dtype", "storage", "last_rows", "engine")
        if any(getattr(other, name) != getattr(wanted, name) for name in same) \
                or not set(wanted.tap_layers) <= set(other.tap_layers):
            continue
        try:
            missing = _missing(folder, samples)
        except UserError as error:
            print(f"hidden_states: {error}; extracting anew", flush=True)
            continue
        if not missing:
            print(f"hidden_states: all of it is in {folder}, nothing is extracted", flush=True)
            return folder
    return None


def given(path: str) -> Path:
    """The folder that `hidden_states.path` names; raises where there is none to read."""
    folder = Path(path).expanduser()
    if not os.path.isdir(folder):  # never raises, unlike Path.is_dir
        found = "a file" if os.path.exists(folder) else "nothing that can be reached"
        raise UserError(f"hidden_states.path={path} is no folder: expected one of stored hidden states "
                        f"(manifest.json, index.bin, shard-*.bin), found {found}; check the path")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"hidden_states.path={path} may not be read by this user: expected the rights to "
                        "list and to open its files, found none; change them, or take a copy")
    if not Manifest.path(folder).is_file():
        raise UserError(f"hidden_states.path={path} holds no hidden states: expected manifest.json, "
                        "index.bin and shard-*.bin, found no manifest.json; check the path")
    return folder.resolve()


def foresee(folder: Path, wanted: Manifest, samples: Sequence[Sample] = ()) -> None:
    """Raises when `adopt` would; what cannot be read is left to `adopt`, which says so with its remedy."""
    try:
        found, missing = Manifest.read(folder), _missing(folder, samples) if samples else []
    except UserError:
        return
    _require_fit(found, folder, wanted)
    _require_all(missing, folder, samples)


def _require_fit(found: Manifest, folder: Path, wanted: Manifest) -> None:
    """What is wrong with `folder` may be that it is sound, and another target's."""
    for name, words in (("target", "target"), ("template", "chat template")):
        if (theirs := getattr(found, name)) != (ours := getattr(wanted, name)):
            raise UserError(f"hidden_states.path={folder} holds hidden states of another {words}: expected "
                            f"{ours}, found {theirs}; set target= to the one that they were made for, or "
                            "leave hidden_states.path out")
    found.require(folder, layers=wanted.tap_layers)


def forget(out: Path) -> None:
    """Removes the links that a run left here which ended before its stage did: what is linked is decided
    anew, and nothing is ever written through one."""
    for place in out.iterdir():
        if place.is_symlink():
            place.unlink()


def adopt(folder: Path, out: Path, wanted: Manifest, samples: Sequence[Sample]) -> None:
    """Links `folder` into `out`, if it has the wanted layers of all `samples`, of the same target and
    template; else raises. Dtype and storage are those of the folder, which is only ever read."""
    link(folder, out)
    manifest = Manifest.read(out)
    _require_fit(manifest, folder, wanted)
    _require_all(_missing(out, samples), folder, samples)
    for name in ("dtype", "storage", "last_rows"):
        if (theirs := getattr(manifest, name)) != (ours := getattr(wanted, name)):
            print(f"hidden_states: {Manifest.path(folder)} says {name} {theirs}, this run {ours}; the gates "
                  "judge whether the states are good enough", flush=True)


def _require_all(missing: Sequence[str], folder: Path, samples: Sequence[Sample]) -> None:
    if missing:
        named = ", ".join([*missing[:SHOWN], *(["..."] if len(missing) > SHOWN else [])])
        raise UserError(f"hidden_states.path={folder} lacks {len(missing)} of the {len(samples)} samples of "
                        f"this run ({named}), or holds them with other tokens: take the samples from the "
                        "folder with responses=stored, or leave hidden_states.path out")


def link(folder: Path, out: Path) -> None:
    """Puts links to the files of `folder` into `out`."""
    names = [Manifest.path(folder).name, index_path(folder).name,
             *(shard_path(folder, number).name for number in shard_numbers(folder))]
    beside = folder.parent == out.parent
    for name in names:
        place = out / name
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.join("..", folder.name, name) if beside else folder / name)


def _missing(folder: Path, samples: Sequence[Sample]) -> list[str]:
    """Ids of the samples that are not stored, or with other tokens or another mask."""
    reader = ShardReader(folder)
    try:
        return [sample.id for sample in samples if not reader.holds(sample)]
    finally:
        reader.close()
