"""`latest.json` below the root of results maps each stage to its newest finished folder, so that people and
scripts find it. A convenience: it is made anew where it cannot be read, and only missed where it cannot be
written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from trainer._folders import locked, write_json
from trainer.errors import UserError, first_line


def remember(root: Path, folders: dict[str, str]) -> None:
    """Puts the `folders` by stage among those that are known."""
    path = root / "latest.json"
    try:
        if folders.items() - _known(path).items():
            with locked(path, "latest.json", wait=True):
                write_json(path, {**_known(path), **folders})
    except (OSError, UserError) as error:
        reason = first_line(error.__cause__ or error)
        print(f"note: {path} cannot be written and does not name these results ({reason})", flush=True)


def _known(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(folder) for name, folder in known.items()} if isinstance(known, dict) else {}
    return {}
