"""Puts a trained MTP module into a copy of its target, which a server then loads.

    python tools/apply_mtp.py CHANGES TARGET FOLDER

CHANGES is the folder `changes` of a finished stage export (or a download of it), TARGET the complete
checkpoint that the module was trained for, FOLDER is made. Files that stay as they are become hard links, or
copies where FOLDER lies on another disk; TARGET is only read. `--other-weights` takes a target with the same
layers whose files are not those that were trained with. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from trainer import _folders  # noqa: E402
from trainer.architectures.mtp import Mtp  # noqa: E402
from trainer.architectures.mtp_layouts import layout_of, served_as  # noqa: E402
from trainer.architectures.mtp_module import unlike  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.export.formats import FORMATS  # noqa: E402
from trainer.export.stitched import stitch  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.target import check_folder, folder_identity, text_part  # noqa: E402

AGAIN = "give the folder changes of a finished stage export"
RECORD = {"method": str, "steps": int, "config_changes": dict, "target_config": dict}


def contents(changes: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json of the changes, and their tensors; UserError for a folder of anything else."""
    path = changes / "config.json"
    record = _folders.read_object(path, AGAIN)
    wrong = [f"{key} {record.get(key)!r}" for key, kind in RECORD.items()
             if type(record.get(key)) is not kind]
    if not wrong and (record["method"] != Mtp.method or record["steps"] < 1):
        wrong = [f"method {record['method']!r} and steps {record['steps']}"]
    if wrong:
        raise UserError(f"{changes} is no folder of changes: its config.json says {wrong[0]}; {AGAIN}")
    try:
        return record, load_file(changes / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{changes / 'model.safetensors'} cannot be read ({error}); {AGAIN}") from error


def require_target(changes: Path, target: Path, record: dict[str, Any], other_weights: bool) -> None:
    """Raises unless the target is, by its config.json and its identity, one for the module."""
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
    facts = changes / "speculator.json"
    if not facts.is_file():
        return
    identity, found = _folders.read_object(facts, AGAIN).get("target_identity"), folder_identity(target)
    if identity != found and not other_weights:
        raise UserError(f"{target} (identity {found}) is not the target that the module in {changes} was "
                        f"trained for ({identity}): its weights, tokenizer or template differ; take that "
                        "one, or say --other-weights, and expect fewer accepted tokens")


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


def apply(changes: Path, target: Path, folder: Path, other_weights: bool) -> dict[str, str]:
    """Makes the folder; commands that serve it. UserError for anything to mend."""
    folder = Path(os.path.abspath(folder))
    partial = require_free(folder, changes, target)
    record, tensors = contents(changes)
    require_target(changes, target, record, other_weights)
    del record["target_config"]
    try:
        stitch(target, partial, tensors, {**record, "tensors": sorted(tensors)})
        _folders.settle(partial)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be made ({error}); give it another place, or free some "
                        "space") from error
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
