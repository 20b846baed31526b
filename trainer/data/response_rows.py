"""Rows of `responses.jsonl`: how they are written, what is refused in them, and what is told of them.

A row has the ids of the prompt and of the answer, `{"id", "split", "category", "prompt", "tokens",
"finish_reason"}`, and a `mask` over both where not exactly the answer is supervised; `language` and the mode
of `thinking` that was asked for (`slices`) where they are known.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import UserError, first_line
from trainer.records import UNKNOWN, Sample
from trainer.target import Target

Row = dict[str, Any]
RESPONSES = "responses.jsonl"  # in the folder of every finished stage
TEXTS, LISTS = ("id", "split", "category", "finish_reason"), ("prompt", "tokens")


class GroupFile:
    """An append-only JSONL of groups. Opening it cuts a torn tail: rows after the last whole group. A group
    is on the disk before the next is written, so a damaged row further in front is no torn tail: an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
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
                pending[row["id"]] = row
                if row.pop("last", False):
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
        self.rows.update({row["id"]: row for row in rows})


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
    samples = [Sample(row["id"], tuple(row["prompt"] + row["tokens"]), tuple(mask_of(row)), row["category"],
                      row["finish_reason"], row.get("language", UNKNOWN), row.get("thinking", UNKNOWN))
               for row in read_rows(folder) if row["split"] == split]
    return sorted(samples, key=lambda sample: sample.id)


def describe(rows: list[Row], target: Target, dropped: list[str]) -> dict[str, Any]:
    """The numbers of the stage's record; prints the supervised share; refuses rows of which nothing can be
    learnt."""
    cut = [row["id"] for row in rows if row["finish_reason"] == "length"]
    masks = {row["id"]: mask_of(row) for row in rows}
    empty = [row["id"] for row in rows if sum(masks[row["id"]]) - (row["finish_reason"] != "length") <= 0]
    tokens, supervised = sum(map(len, masks.values())), sum(map(sum, masks.values()))
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"no training prompt is left: {len(dropped)} prompts are too long, and the rest is "
                        "held out; raise target.max_length, or give shorter prompts")
    if not supervised or len(empty) == len(rows):
        raise UserError(f"of the {tokens} tokens in {len(rows)} rows {supervised} are supervised, and none "
                        "of them is more than the end of an answer: the template of "
                        f"{target.tokenizer.name_or_path} hides the answers, or the target gives none")
    remarks = {"reached the limit of tokens": cut, "are empty": empty, "were too long and left out": dropped}
    print(f"supervised: {supervised} of {tokens} tokens ({supervised / tokens:.1%}) in {len(rows)} rows"
          + "".join(f"; {len(found)} {what}" for what, found in remarks.items() if found))
    return {"rows": len(rows), "tokens": tokens, "supervised": supervised,
            "supervised_share": round(supervised / tokens, 4), "cut": len(cut), "cut_ids": cut[:20],
            "empty": len(empty), "empty_ids": empty[:20],
            "dropped": len(dropped), "dropped_ids": dropped[:20],
            "splits": dict(Counter(row["split"] for row in rows)),
            "categories": dict(Counter(row["category"] for row in rows)),
            "mean_answer_tokens": round(supervised / len(rows), 1),
            "vocabulary": target.config["vocab_size"]}
