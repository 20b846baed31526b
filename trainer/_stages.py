"""What a stage promises, and its place in a run. `pipeline` goes through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer._stage_record import finished


class Stage(ABC):
    """One step of the run; implementations are frozen dataclasses that do nothing heavy when built."""

    after: ClassVar[tuple[str, ...]]  # names of the stages whose folders it reads
    version: ClassVar[int]  # raise it when the code changes the result
    uses: ClassVar[tuple[str, ...]] = ()  # stages whose folders it reads where they are finished, or in run
    idle: ClassVar[tuple[str, ...]] = ()  # keys of its settings, nested ones with dots, that decide nothing
    neutral: ClassVar[Mapping[str, Any]] = {}  # keys, as in idle, by a value with which they do nothing
    lasting: ClassVar[bool] = True  # False: a view of how things are now, made anew every time
    sized: ClassVar[tuple[str, ...]] = ()  # globs of files with checksums of their own, or that may grow

    @property
    def brings(self) -> tuple[str, ...]:
        """Stages that end every run which names this one, as its settings ask for them."""
        return ()

    @property
    def processes(self) -> int:
        """How many call `run` together, each with the same inputs; what the first one returns counts."""
        return 1

    @property
    def quick(self) -> bool:
        """Whether `run` takes a moment and nothing but files that are here, so that `--check` may try it."""
        return False

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        """By key what is wrong with settings that are right one by one, of this stage or together with those
        of `stages`, by name all that it stands on. Cheap: nothing outside the settings is looked at."""
        return {}

    def remarks(self, stages: Mapping[str, Any]) -> list[str]:
        """What is right in these settings, and yet not what one may expect; told before the stage runs."""
        return []

    def external(self) -> dict[str, Any]:
        """JSON-able facts outside the settings that decide the result, such as the hash of an input file."""
        return {}

    def preflight(self) -> None:
        """Raises UserError unless what it needs on this machine is there. Asked of every stage that will run,
        before the first one does."""
        return

    def foresee(self, inputs: dict[str, Path]) -> None:
        """Raises what can be told already from those of `inputs` that are finished, before the stages between
        are run. What `run` says as early need not be said here but for `--check`."""
        return

    @abstractmethod
    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        """Writes its result into `out`, going on from what lies there, and returns the numbers that matter;
        "gates" among them holds gates as JSON by name. `inputs` holds the folder of each stage in `after`,
        and of those in `uses` that are finished."""

    def tell(self, folder: Path) -> None:
        """Prints what people want to see of a finished `folder`; every run that names the stage ends so, the
        last stage first: what was measured, and then what to do with it."""
        return


@dataclass(frozen=True)
class Planned:
    """A stage with its place: where its folder is, and what it was computed from."""

    name: str
    stage: Stage
    settings: dict[str, Any]
    fingerprint: str
    inputs: dict[str, str]
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial")

    @property
    def state(self) -> str:
        if self.stage.lasting and finished(self.folder, self.fingerprint):
            return "reuse"
        return "continue" if self.partial.is_dir() and any(self.partial.iterdir()) else "run"
