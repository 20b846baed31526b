"""Stage `tune`: the draft length to serve with, from what was measured, put into the exported folders.

Made anew whenever it is named, since it takes a moment and the exported folders may have been made anew, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.evaluate.traffic import drafter_of, read_rows, tune
from trainer.evaluate.tuning_table import print_tuning
from trainer.export.tuned import possible_lengths, write_tuned
from trainer.pipeline import Stage
from trainer.training.build import MakeDrafter, draft_problem


@dataclass(frozen=True)
class Tune(Stage):
    """Chooses among all K that the drafter can draft, up to its longest."""

    drafter: MakeDrafter

    after: ClassVar[tuple[str, ...]] = ("export", "evaluate")
    lasting: ClassVar[bool] = False
    version: ClassVar[int] = 1

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        exported = json.loads((inputs["export"] / "export.json").read_text())
        possible = [k for k in possible_lengths(exported) if draft_problem(self.drafter, k) is None]

        def lengths(method: str, longest: int) -> Sequence[int]:
            return possible if method == exported["method"] else range(1, longest + 1)

        tuning = tune(read_rows(inputs[self.after[-1]] / "rows.json"), lengths)
        found = drafter_of(tuning, exported["method"])
        (out / "tuning.json").write_text(json.dumps(tuning, indent=1) + "\n")
        write_tuned(inputs["export"], found)
        return {"k": found["default_k"], "speculate": found["speculate"], "speedup": found["speedup"],
                "schedule": found["num_speculative_tokens_per_batch_size"],
                "doubts": len(found["doubts"]) + sum(len(own["doubts"]) for own in found["classes"])}

    def tell(self, folder: Path) -> None:
        print_tuning(json.loads((folder / "tuning.json").read_text()))


class TuneSweep(Tune):
    """The same from the rows of a sweep."""

    after: ClassVar[tuple[str, ...]] = ("export", "sweep")
