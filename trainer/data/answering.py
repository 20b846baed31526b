"""Groups of questions -> a file of answers in the order of the groups, whichever answer comes first.

What has come of a group that is not whole lies beside that file, answer by answer: a killed run asks for the
others alone. Not so where an engine computes a group as one; there it does so again, to give the same bits.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.data.response_rows import GroupFile, Row, parsed
from trainer.engines.base import TargetEngine
from trainer.progress import Progress
from trainer.records import Sampling


class Answering:
    """Has `engine` answer questions, which are rows without "tokens" and "finish_reason", into the file at
    `path`; `rows` are those of whole groups by their ids. Raises UserError for a file that is damaged."""

    def __init__(self, engine: TargetEngine, path: Path) -> None:
        self.engine = engine
        self.file = GroupFile(path)
        self.arrived = Arrived(path.with_name(f"{path.name}.arrived"), kept=engine.apart)
        self.arrived.forget(self.file.rows)

    @property
    def rows(self) -> dict[str, Row]:
        return self.file.rows

    @property
    def count(self) -> int:
        """Questions that have their answer."""
        return len(self.file.rows) + len(self.arrived.rows)

    def ask(self, groups: Sequence[list[Row]], sampling: Sampling, bar: Progress) -> None:
        """Has those groups answered that are not yet; each answer moves the `bar` on."""
        left = deque(group for group in groups if not self.file.has(group))
        questions = {row["id"]: row for group in left for row in group}
        self.arrived.forget(name for name, row in questions.items() if not self.arrived.answers(row))
        missing = [{row["id"]: row["prompt"] for row in group if row["id"] not in self.arrived.rows}
                   for group in left]
        self._write_whole(left)
        arriving = self.engine.completions(filter(None, missing), sampling)
        began, tokens = time.perf_counter(), 0  # a server was started by now
        for name, answer in arriving:
            self.arrived.add({**questions[name], "tokens": list(answer.tokens),
                              "finish_reason": answer.finish_reason})
            self._write_whole(left)
            tokens += len(answer.tokens)
            bar.advance(1, **{"tokens/s": tokens / max(time.perf_counter() - began, 1e-6)})

    def finish(self) -> None:
        """Leaves the file alone, when all is asked."""
        self.arrived.forget([*self.arrived.rows])

    def _write_whole(self, left: deque[list[Row]]) -> None:
        """Moves the first of the groups that are `left`, as far as they are whole, into their file."""
        while left and all(row["id"] in self.arrived.rows for row in left[0]):
            group = left.popleft()
            self.file.append([self.arrived.rows[row["id"]] for row in group])
            self.arrived.forget(row["id"] for row in group)


class Arrived:
    """Answers of groups that are not whole by their ids, `kept` in a JSONL or not. Of a damaged file the rows
    before the damage count: the others are asked for again."""

    def __init__(self, path: Path, kept: bool) -> None:
        self.path, self.kept = path, kept
        self.rows: dict[str, Row] = {}
        if not path.exists():
            return
        if not kept:  # by an engine that answers otherwise
            path.unlink()
            return
        whole = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    row = parsed(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                self.rows[row["id"]] = row
                whole += len(line)
        os.truncate(path, whole)

    def answers(self, question: Row) -> bool:
        """Whether the answer to exactly this has arrived; earlier turns may have been answered anew since."""
        row = self.rows.get(question["id"])
        return row is not None and all(row.get(key) == value for key, value in question.items())

    def add(self, row: Row) -> None:
        """Keeps it from whatever ends this process; for a machine that stops it is not worth waiting."""
        self.rows[row["id"]] = row
        if self.kept:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def forget(self, names: Iterable[str]) -> None:
        gone = [name for name in names if self.rows.pop(name, None) is not None]
        if not self.rows:
            self.path.unlink(missing_ok=True)
        elif gone and self.kept:
            self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()))
