"""What the stages before the report left in their folders, read and checked.

Only the records and the measured rows are indispensable; a training log or an export description that is
absent is empty here, so that the report leaves its section out.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.errors import UserError

ROW_FIELDS = (
    "model", "method", "dataset", "baseline_tok_s", "num_speculative_tokens", "speedup", "tok_s",
    "mean_accepted_length", "acceptance_rate", "per_position_acceptance",
)  # fmt: skip


def read_rows(inputs: dict[str, Path]) -> list[dict]:
    if "evaluate" not in inputs:
        raise UserError("The report needs the stage evaluate, which is not among its inputs; add it to run=.")
    path = inputs["evaluate"] / "rows.json"
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} holds no rows, expected some; {_again(path)}")
    for number, row in enumerate(rows):
        missing = [field for field in ROW_FIELDS if field not in row]
        if missing:
            lacks = f"Row {number} of {path} lacks {', '.join(missing)}"
            raise UserError(f"{lacks}; {_again(path)}")
    return rows


def read_log(folder: Path | None) -> tuple[list[dict], int]:
    """The training log in order of steps, and the number of unreadable lines.

    A continued run may log a step twice (the last one counts), and a killed one may leave a torn line.
    """
    if folder is None or not (folder / "log.jsonl").exists():
        return [], 0
    by_step, torn = {}, 0
    for line in (folder / "log.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
        except (json.JSONDecodeError, KeyError, TypeError):
            torn += 1
    return [by_step[step] for step in sorted(by_step)], torn


def read_export(folder: Path | None) -> dict:
    if folder is None or not (folder / "export.json").exists():
        return {}
    return read_json(folder / "export.json")


def read_json(path: Path) -> dict | list:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise UserError(f"The report needs {path}, which is missing; {_again(path)}") from missing
    except ValueError as broken:
        raise UserError(f"{path} is not JSON ({broken}); {_again(path)}") from broken


def _again(path: Path) -> str:
    return f"remove {path.parent} and run the same command again."
