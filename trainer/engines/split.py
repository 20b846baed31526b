"""Answers from one engine, hidden states from another: each for what it is fast at.

The gates on hidden states hold for the engine that computes them, whichever answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.engines.base import Group, Session, TargetEngine
from trainer.errors import UserError
from trainer.ranges import Dtype, SequenceLength
from trainer.records import Completion, HiddenStates, Sampling, Tap


class SplitEngine(TargetEngine):
    """`answers` generates, `states` gives hidden states and sessions; what is not asked for is not loaded.
    Both compute in `dtype` and up to `max_length` tokens, which is theirs by configuration.

    Raises UserError when one of them is set to another length."""

    def __init__(self, answers: TargetEngine, states: TargetEngine, dtype: Dtype,
                 max_length: SequenceLength) -> None:
        self.answers, self.states, self.dtype = answers, states, dtype
        for name, part in (("answers", answers), ("states", states)):
            if part.max_length != max_length:
                raise UserError(f"target_engine.{name}.max_length={part.max_length} is not "
                                f"target_engine.max_length={max_length}; set the latter alone.")
        self.every_tap, self.apart = states.every_tap, answers.apart
        self._open = ExitStack()
        self._loaded: dict[str, TargetEngine] = {}

    @property
    def device(self) -> str:
        return self.states.device

    @property
    def origin(self) -> str:
        """Of what computes hidden states."""
        return self.states.origin

    @property
    def group(self) -> int:
        return self.answers.group

    @property
    def in_flight(self) -> int:
        return self.states.in_flight

    @property
    def max_length(self) -> int:
        return self.states.max_length

    def preflight(self) -> None:
        self.answers.preflight()
        self.states.preflight()

    def load(self, folder: Path, end_ids: Sequence[int]) -> Self:
        self.answers.load(folder, end_ids)
        self.states.load(folder, end_ids)
        return self

    def __enter__(self) -> Self:
        self._open, self._loaded = ExitStack(), {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)

    def completions(self, groups: Iterable[Group], sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        return self._entered("answers").completions(groups, sampling)

    def hidden_states(self, rows: Sequence[Sequence[int]],
                      tap_layers: Sequence[Tap]) -> Iterator[HiddenStates]:
        return self._entered("states").hidden_states(rows, tap_layers)

    def likelihoods(self, rows: Iterable[Sequence[int]]) -> Iterator[list[float]]:
        """Of what computes hidden states, which reads rows as well."""
        return self._entered("states").likelihoods(rows)

    def session(self, tap_layers: Sequence[Tap]) -> Session:
        return self._entered("states").session(tap_layers)

    def _entered(self, name: str) -> TargetEngine:
        if name not in self._loaded:
            self._loaded[name] = self._open.enter_context(getattr(self, name))
        return self._loaded[name]
