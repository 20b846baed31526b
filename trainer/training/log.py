"""Where the numbers of a run go: `log.jsonl`, and wandb when a project is named. A resumed run begins the
file anew with the lines that its checkpoint holds: the file may have lost some, or have some of later steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError


class Log:
    def __init__(self, path: Path, lines: list[dict[str, Any]], wandb_project: str | None) -> None:
        self.lines = list(lines)
        path.write_text("".join(map(_line, self.lines)))
        self.file = path.open("a")
        self.wandb: Any = None
        if wandb_project:
            with _wandb(wandb_project) as wandb:
                self.wandb = wandb.init(project=wandb_project, id=path.parent.name.split(".")[0],
                                        resume="allow")

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
def require_wandb(project: str) -> None:
    """Raises UserError unless wandb is installed and logged in, or told to stay offline (WANDB_MODE)."""
    with _wandb(project) as wandb:
        wandb.login(verify=True)


@contextmanager
def _wandb(project: str) -> Iterator[Any]:
    """The package; what it complains of becomes one sentence."""
    remedy = "or turn it off with train.runtime.wandb_project=null"
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError(f"train.runtime.wandb_project={project} needs the package {error.name}, which is not "
                        f"installed; install it, {remedy}") from error
    try:
        yield wandb
    except (wandb.errors.Error, ValueError) as error:
        reason = str(error).splitlines()[0].strip().rstrip(".") if str(error) else type(error).__name__
        raise UserError(f"train.runtime.wandb_project={project} cannot be used: {reason}; mend that (`wandb "
                        f"login`, WANDB_MODE=offline), {remedy}") from error
