"""Puts a trained MTP module into a copy of its target, which a server then loads.

    python tools/apply_mtp.py CHANGES TARGET FOLDER

CHANGES is the folder `changes` of a finished stage export (or a download of it), TARGET the complete
checkpoint that the module was trained for, FOLDER is made: the same as the folder `stitched` of the export.
Files that stay as they are become hard links, or copies where FOLDER lies on another disk; TARGET is only
read, whole, and compared with what the module was trained for. `--other-weights` takes a target with the same
layers whose files are not those that were trained with; `--unchecked` takes a folder of changes of an earlier
version, which says no checksums. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from trainer import _folders, cpu_build  # noqa: E402
from trainer.architectures.mtp import Mtp  # noqa: E402
from trainer.architectures.mtp_layouts import layout_of, served_as  # noqa: E402
from trainer.architectures.mtp_module import unlike  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.export.base import told  # noqa: E402
from trainer.export.card import Card  # noqa: E402
from trainer.export.checksums import (  # noqa: E402
    FILE,
    Sums,
    read_checksums,
    require_own,
    require_weights,
)
from trainer.export.formats import FORMATS  # noqa: E402
from trainer.export.provenance import read_provenance, write_provenance  # noqa: E402
from trainer.export.serve_line import cpu_server, draft_lengths  # noqa: E402
from trainer.export.stitched import KEPT, Stitched, stitch  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.target import check_folder, folder_identity, text_part  # noqa: E402

AGAIN = "give the folder changes of a finished stage export"
RECORD = {"method": str, "steps": int, "config_changes": dict, "target_config": dict}
FACTS = {"method": str, "needs_v2": bool, "max_k": int, "default_k": int, "target": str,
         "target_identity": str, "template_hash": str, "trained_modes": list}  # of speculator.json
OTHER = "say --other-weights, and expect fewer accepted tokens"


def described(changes: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and speculator.json of the changes; UserError for a folder of anything else."""
    record = _of_kinds(changes, "config.json", RECORD)
    if record["method"] != Mtp.method or record["steps"] < 1:
        raise UserError(_none(changes, "config.json",
                              f"method {record['method']!r} and steps {record['steps']}"))
    return record, _of_kinds(changes, "speculator.json", FACTS)


def _of_kinds(changes: Path, name: str, kinds: dict[str, type]) -> dict[str, Any]:
    found = _folders.read_object(changes / name, AGAIN)
    for key, kind in kinds.items():
        if type(found.get(key)) is not kind:
            raise UserError(_none(changes, name, f"{key} {found.get(key)!r}"))
    return found


def _none(changes: Path, name: str, says: str) -> str:
    return f"{changes} is no folder of changes: its {name} says {says}; {AGAIN}"


def trained(changes: Path, known: tuple[Sums, Sums] | None) -> dict[str, Tensor]:
    """The tensors of the changes; UserError unless they are as they were exported, where that is known."""
    if known is not None:
        require_own(changes, known[0], "copy or download the folder again, or export the module again")
    try:
        return load_file(changes / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{changes / 'model.safetensors'} cannot be read ({error}); {AGAIN}") from error


def require_checksums(changes: Path, unchecked: bool) -> tuple[Sums, Sums] | None:
    known = read_checksums(changes, AGAIN)
    if known is None and not unchecked:
        raise UserError(f"{changes} has no {FILE}, as an earlier version exported it, so that nobody sees "
                        "whether its tensors or the target's weights were changed or torn; remove the folder "
                        "of the stage export and run its command again, or say --unchecked")
    return known


def require_target(changes: Path, target: Path, record: dict[str, Any], facts: dict[str, Any],
                   other_weights: bool) -> str:
    """The target's identity; raises unless it is, by its config.json and that, one for the module."""
    check_folder(target)
    config = text_part(_folders.read_object(target / "config.json", "fetch it again"))
    expected = record["target_config"]
    try:
        layout_of(config)
        needed = served_as(config)[0]
        served = {**config, **needed}
        key = unlike(served, expected)
    except ValueError as error:
        raise UserError(f"{target} cannot take a module: {error}") from error
    if key is not None:
        raise UserError(f"{target} has {key} {served.get(key)!r}, and the module in {changes} is of a target "
                        f"with {expected.get(key)!r}; take that target")
    if record["config_changes"] != needed:
        raise UserError(f"config.json in {changes} has config_changes {record['config_changes']}, and "
                        f"{target} needs {needed} to be served; export the module again")
    if problem := Mtp.served_problem(config, record["steps"]):
        raise UserError(f"steps {record['steps']} in config.json of {changes} {problem}; train the module "
                        "for such a draft length")
    identity, found = facts["target_identity"], folder_identity(target)
    if identity != found and not other_weights:
        raise UserError(f"{target} (identity {found}) is not the target that the module in {changes} was "
                        f"trained for ({identity}): its weights, tokenizer or template differ; take that "
                        f"one, or {OTHER}")
    return found


def require_free(folder: Path, changes: Path, target: Path) -> Path:
    """Where the new folder is made before it is in its place; raises where there can be none."""
    partial = Path(f"{folder}.partial")
    for place in (folder, partial):
        if os.path.lexists(place):
            raise UserError(f"{place} is there already; give another name for the new folder, or remove what "
                            "a call that was killed has left")
    for source in (changes, target):
        if folder.resolve().is_relative_to(source.resolve()):
            raise UserError(f"{folder} lies inside {source}, which is only read; give the new folder another "
                            "place")
    return partial


def describe(folder: Path, changes: Path, facts: dict[str, Any]) -> None:
    """What the folder says of itself beside its weights: the same as that of the export."""
    made = read_provenance(changes)
    (folder / "speculator.json").write_text(json.dumps(facts, indent=1) + "\n")
    if made:
        write_provenance(folder, made)
    name = facts.get("model") or Path(facts["target"]).name  # earlier versions did not say it
    (folder / "README.md").write_text(Card(Stitched.name, facts, name, made).text())


def apply(changes: Path, target: Path, folder: Path, other_weights: bool, unchecked: bool) -> list[str]:
    """Makes the folder; how it is served, in lines. UserError for anything to mend."""
    folder = Path(os.path.abspath(folder))
    partial = require_free(folder, changes, target)
    record, facts = described(changes)
    known = require_checksums(changes, unchecked)
    tensors = trained(changes, known)
    facts["target_identity"] = require_target(changes, target, record, facts, other_weights)
    if known is not None and not other_weights:
        require_weights(target, known[1], f"fetch the target again, or {OTHER}")
    try:
        stitch(target, partial, tensors, {**{key: record[key] for key in KEPT}, "tensors": sorted(tensors)})
        describe(partial, changes, facts)
        _folders.settle(partial)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be made ({error}); give it another place, or free some "
                        "space") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return told(FORMATS["stitched"].commands(facts["method"], folder, facts["target"], draft_lengths(facts),
                                             cpu_build.here(cpu_server(facts))), facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("changes", "target", "folder"):
        parser.add_argument(name, type=Path)
    for name in ("--other-weights", "--unchecked"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    print("\n".join(apply(options.changes, options.target, options.folder, options.other_weights,
                          options.unchecked)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
