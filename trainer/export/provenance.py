"""`provenance.json` of an exported folder: how its drafter came about, and a command that repeats it.

Beside `speculator.json`, which says what the drafter is. The settings are those that the stages behind it
recorded, everything filled in and passwords masked, with their fingerprints, which name data and caches. The
folder travels, so the home folder of this machine is a `~` in it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer._folders import read_sealed
from trainer._stage_record import made_by

FILE = "provenance.json"
KEPT = ("fingerprint", "settings")
MADE_BY = ("versions", "commit", "hardware")
OF_THE_PLACE = ("run", "run_root", "cache_root", "recipe", "export.hub", "command")


def provenance(inputs: Mapping[str, Path], recipe: str | None, command: str | None,
               target_commit: str | None, own: dict[str, Any]) -> dict[str, Any]:
    """Its content. `command` is a JSON list of words, `own` the settings of the export. What a stage was run
    by is told where that is not what ran the export."""
    records, here = _records(inputs), made_by()
    stages = {}
    for name, record in records.items():
        other = {key: record[key] for key in MADE_BY if key in record and record[key] != here[key]}
        stages[name] = {key: record[key] for key in KEPT if key in record} | other
    found = {"recipe": recipe, "repeat": _repeat(recipe, command, target_commit), **here, "stages": stages,
             "export": own}
    home = str(Path.home())
    text = json.dumps(found)
    return json.loads(text.replace(f"{home}/", "~/") if home != "/" else text)


def write_provenance(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read_provenance(folder: Path) -> dict[str, Any]:
    """What a folder says; nothing where it is of a version that did not."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _records(inputs: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Of the finished stages and of all behind them, by name; without those that are not there any more."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, folder: Path) -> None:
        if name in found or not (folder / "stage.json").is_file():
            return
        record = read_sealed(folder / "stage.json")
        for upstream, digest in record.get("inputs", {}).items():
            add(upstream, folder.parent.parent / upstream / digest[:16])
        found[name] = record

    for name, folder in inputs.items():
        add(name, folder)
    return found


def _repeat(recipe: str | None, command: str | None, target_commit: str | None) -> str | None:
    """The command line without what is of one machine alone, and with the commit that the target's branch led
    to; that of prompts is in their settings."""
    if command is None:
        return None
    pinned = {} if target_commit is None else {"target.source.revision": target_commit}
    words = [word for word in json.loads(command) if not any(
        f"{word.partition('=')[0].lstrip('+~')}.".startswith(f"{key}.") for key in (*OF_THE_PLACE, *pinned))]
    chosen = [] if recipe is None else [f"recipe={recipe}"]
    return shlex.join(["python", "-m", "trainer", *chosen, *words,
                       *(f"{key}={commit}" for key, commit in pinned.items())])
