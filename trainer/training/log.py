"""Where the numbers of a run go: `log.jsonl`, and wandb when a project is named. A resumed run cuts what it
repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    def __init__(self, path: Path, step: int, wandb_project: str | None) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self.file = path.open("a")
        self.wandb: Any = None
        if wandb_project:
            import wandb

            self.wandb = wandb.init(project=wandb_project, id=path.parent.name.split(".")[0], resume="allow")

    def write(self, numbers: dict[str, Any]) -> None:
        self.file.write(json.dumps(numbers) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(numbers, step=numbers["step"])

    def close(self) -> None:
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()
