"""What tuning found, written into a folder that was exported before: its draft length, and K by batch size.

`speculator.json` gets the keys that vLLM reads in `--speculative-config`; the config of a folder that is
served alone its default length; the card, and the commands of a finished stage `export`, both. Every file is
replaced whole, and the stage's record is told.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer import _folders
from trainer.errors import UserError, first_line
from trainer.export.card import TUNED, default_line, told_tuning
from trainer.export.formats import FORMATS
from trainer.export.serve_line import SCHEDULE, draft_lengths

FILES = ("speculator.json", "config.json", "README.md")


def exported_facts(folder: Path) -> dict[str, Any]:
    """What an exported folder says of its drafter: of a finished stage `export`, or of one of its formats."""
    whole = folder / "export.json"
    return _read(whole if whole.is_file() else folder / "speculator.json")


def possible_lengths(facts: dict[str, Any]) -> Sequence[int]:
    """The draft lengths that a server takes of the drafter; all up to its longest where the folder is older
    than what it says of them."""
    return facts.get("possible_k") or range(1, facts["max_k"] + 1)


def write_tuned(folder: Path, tuned: dict[str, Any]) -> None:
    """Writes a tuned drafter, with `default_k`, `speculate`, `speedup` and the schedule, into `folder`: all
    formats of a finished stage `export`, which is given itself or as one of its formats, or a copy of one.
    Where it is best not to speculate the default length stays. Raises UserError for another folder."""
    root = next((each for each in (folder, folder.parent) if (each / "export.json").is_file()), None)
    if root is None:
        _write(folder, tuned)
        return
    exported = _read(root / "export.json")
    if unknown := [form for form in exported["formats"] if form not in FORMATS]:
        raise UserError(f"{root / 'export.json'} names the formats {', '.join(map(repr, unknown))}, expected "
                        f"some of {', '.join(FORMATS)}; give a folder of a finished stage export")
    names = [f"{form}/{name}" for form in exported["formats"] for name in FILES]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_folders.locked(root, f"the export {root}", "the exported folder"))
        if (root / "stage.json").is_file():
            stack.enter_context(_folders.changing(root, ["export.json", *names]))
        for form in exported["formats"]:
            _write(root / form, tuned)
        facts = _with(exported, tuned)
        commands = {name: _retold(command, exported, facts)
                    for name, command in exported["serve_commands"].items()}
        _folders.write_json(root / "export.json", {**facts, "serve_commands": commands})


def _write(folder: Path, tuned: dict[str, Any]) -> None:
    described, config, card = (folder / name for name in FILES)
    before = _read(described)
    facts = _with(before, tuned)
    content = _read(config) if config.is_file() else {}
    if "speculators_config" in content:  # it is served alone, and says how
        for method in content["speculators_config"]["proposal_methods"]:
            method["speculative_tokens"] = facts["default_k"]
        _folders.write_json(config, content)
    if card.is_file():
        text = _retold(card.read_text(encoding="utf-8"), before, facts)
        text = text.replace(default_line(before), default_line(facts))
        _folders.write_text(card, text.partition(TUNED)[0] + TUNED + f"\n{told_tuning(facts)}\n")
    _folders.write_json(described, facts)


def _with(facts: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    """The facts with what was tuned in place of what was before."""
    found = {**facts, "default_k": tuned["default_k"] or facts["default_k"], "speculate": tuned["speculate"],
             "tuned_speedup": tuned["speedup"], SCHEDULE: tuned[SCHEDULE]}
    return {key: value for key, value in found.items() if key != SCHEDULE or value}


def _retold(text: str, before: dict[str, Any], facts: dict[str, Any]) -> str:
    """A command, or a card with some, that said what was `before`; its owner may have changed the rest."""
    old, new = (json.dumps(draft_lengths(each))[1:-1] for each in (before, facts))
    return text.replace(old, new)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = "it holds no object"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
    raise UserError(f"{path} cannot be read ({reason}), expected the facts of an exported drafter; give a "
                    "folder of a finished stage export, or a copy of one")
