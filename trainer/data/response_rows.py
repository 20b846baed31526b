"""Rows of `responses.jsonl`: how they are written, and what is refused in them.

A row has the ids of the prompt and of the answer, `{"id", "split", "category", "prompt", "tokens",
"finish_reason"}`, and a `mask` over both where not exactly the answer is supervised; `language` and the mode
of `thinking` that was asked for (`slices`) where they are known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import UserError, first_line
from trainer.records import UNKNOWN, Sample

Row = dict[str, Any]
RESPONSES = "responses.jsonl"  # in the folder of every finished stage
TEXTS, LISTS = ("id", "split", "category", "finish_reason"), ("prompt", "tokens")


class GroupFile:
    """An append-only JSONL of groups. Opening it cuts a torn tail: rows after the last whole group. A group
    is on the disk before the next is written, so a damaged row further in front is no torn tail: an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self._ids: dict[int, int] = {}
        if not path.exists():
            return
        whole = position = 0
        damaged, ends = "", 0  # how many groups end behind the first row that is none
        pending: dict[str, Row] = {}
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                position += len(line)
                try:
                    row = parsed(line)
                except ValueError as error:
                    damaged = damaged or f"{path}, line {number}: is no row of answers ({error})"
                    continue
                if not line.endswith(b"\n"):
                    break
                last = row.pop("last", False)
                pending[row["id"]] = self._shared(row)
                if last:
                    if damaged:
                        ends += 1
                        continue
                    self.rows.update(pending)
                    whole, pending = position, {}
        if ends > 1:
            raise UserError(f"{damaged}, with whole groups behind it; remove this line and all that follow, "
                            "and run the same command again")
        os.truncate(path, whole)

    def has(self, group: list[Row]) -> bool:
        return all(row["id"] in self.rows for row in group)

    def append(self, rows: list[Row]) -> None:
        lines = [json.dumps({**row, "last": True} if row is rows[-1] else row) + "\n" for row in rows]
        with self.path.open("a") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        self.rows.update({row["id"]: self._shared(row) for row in rows})

    def _shared(self, row: Row) -> Row:
        """The row with one object for a token's id, however often it stands there: a fourth of the memory."""
        return {**row, **{name: [*map(self._ids.setdefault, row[name], row[name])] for name in LISTS}}


def parsed(line: bytes | str) -> Row:
    """The row of a line; ValueError says why it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(first_line(error)) from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    wrong = [name for name in TEXTS if not isinstance(row.get(name), str)]
    wrong += [name for name in LISTS if not isinstance(row.get(name), list)
              or not all(type(token) is int for token in row[name])]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing or of another kind")
    if len(mask_of(row)) != len(row["prompt"]) + len(row["tokens"]):
        raise ValueError("its mask is of another length than its tokens")
    return row


def mask_of(row: Row) -> list[bool]:
    """Which of the row's tokens are supervised."""
    return row.get("mask") or [False] * len(row["prompt"]) + [True] * len(row["tokens"])


def read_rows(folder: Path) -> Iterator[Row]:
    """All rows of a finished stage, or of one that was made elsewhere."""
    path = folder / RESPONSES
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield parsed(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: is no row of answers ({error}); fetch or make the "
                                "folder again") from error


def read_samples(folder: Path, split: str) -> list[Sample]:
    """Training rows of one split of a finished stage, ordered by id."""
    known: dict[int, int] = {}

    def sample(row: Row) -> Sample:
        ids = row["prompt"] + row["tokens"]
        tokens = tuple(map(known.setdefault, ids, ids))  # one object for an id, however often it stands there
        return Sample(row["id"], tokens, tuple(mask_of(row)), row["category"], row["finish_reason"],
                      row.get("language", UNKNOWN), row.get("thinking", UNKNOWN))

    samples = [sample(row) for row in read_rows(folder) if row["split"] == split]
    return sorted(samples, key=lambda sample: sample.id)
