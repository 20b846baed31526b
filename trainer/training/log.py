"""Where the numbers of a run go: `log.jsonl`, and wandb when a project is named. A resumed run begins the
file anew with the lines that its checkpoint holds: the file may have lost some, or have some of later steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    def __init__(self, path: Path, lines: list[dict[str, Any]], wandb_project: str | None) -> None:
        self.lines = list(lines)
        path.write_text("".join(map(_line, self.lines)))
        self.file = path.open("a")
        self.wandb: Any = None
        if wandb_project:
            import wandb

            self.wandb = wandb.init(project=wandb_project, id=path.parent.name.split(".")[0], resume="allow")

    def write(self, numbers: dict[str, Any]) -> None:
        self.lines.append(numbers)
        self.file.write(_line(numbers))
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(numbers, step=numbers["step"])

    def close(self) -> None:
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def _line(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers) + "\n"
