"""Puts a trained MTP module into a copy of its target, which a server then loads.

    python tools/apply_mtp.py CHANGES TARGET FOLDER

CHANGES is the folder `changes` of a finished stage export (or a download of it), TARGET the complete
checkpoint that the module was trained for, FOLDER is made. Files that stay as they are become hard links, or
copies where FOLDER lies on another disk; TARGET is only read. `--other-weights` takes a target of the same
sizes whose files are not those that were trained with. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from trainer.architectures.mtp_layouts import layout_of  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.export.formats import FORMATS  # noqa: E402
from trainer.export.stitched import stitch  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.target import SIZES, check_folder, folder_identity, text_part  # noqa: E402


def contents(changes: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json of the changes, and their tensors; UserError for a folder of anything else."""
    try:
        found = json.loads((changes / "config.json").read_text())
        if {"config_changes", "target_config", "steps"} <= found.keys():
            return found, load_file(changes / "model.safetensors")
        reason = "its config.json is of something else"
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error)
    raise UserError(f"{changes} is no folder of changes ({reason}); give the folder changes of a finished "
                    "stage export")


def require_target(changes: Path, target: Path, expected: dict[str, Any], other_weights: bool) -> None:
    """Raises unless the changes can be put into the target."""
    check_folder(target)
    config = text_part(json.loads((target / "config.json").read_text()))
    try:
        layout_of(config)
    except ValueError as error:
        raise UserError(f"{target} cannot take a module: {error}") from error
    for key in SIZES:
        if config[key] != expected[key]:
            raise UserError(f"{target} has {key} {config[key]}, and the module in {changes} is of a target "
                            f"with {expected[key]}; take that target")
    facts = changes / "speculator.json"
    identity = json.loads(facts.read_text())["target_identity"] if facts.is_file() else None
    if identity not in (None, folder_identity(target)) and not other_weights:
        raise UserError(f"{target} (identity {folder_identity(target)}) is not the target that the module in "
                        f"{changes} was trained for ({identity}): its weights, tokenizer or template differ; "
                        "take that one, or say --other-weights, and expect fewer accepted tokens")


def apply(changes: Path, target: Path, folder: Path, other_weights: bool) -> dict[str, str]:
    """Makes the folder; commands that serve it. UserError for anything to mend."""
    partial = folder.with_name(folder.name + ".partial")
    for place in (folder, partial):
        if place.exists():
            raise UserError(f"{place} is there already; give another name for the new folder, or remove what "
                            "a call that was killed has left")
    record, tensors = contents(changes)
    expected = record.pop("target_config")
    require_target(changes, target, expected, other_weights)
    try:
        stitch(target, partial, tensors, {**record, "tensors": sorted(tensors)})
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return FORMATS["stitched"].commands(record["method"], folder, str(target),
                                        {"num_speculative_tokens": record["steps"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("changes", "target", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--other-weights", action="store_true")
    options = parser.parse_args()
    commands = apply(options.changes, options.target, options.folder, options.other_weights)
    print(f"serve it: {commands['vllm']}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
