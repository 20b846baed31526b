"""The promise of a target engine: answer prompts, and give the hidden states of given tokens.

Requests always carry token ids, so there is one tokenisation in the whole pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from torch import Tensor

from trainer.records import Completion, HiddenStates, Sampling, Tap

Group = Mapping[str, Sequence[int]]  # prompts by their keys, each of which seeds the sampling of its own


class Session(ABC):
    """One sequence that the target reads step by step."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Reads `tokens` after what was read before; returns logits [n, V] float32 and taps
        [n, layers * hidden], or as wide as the taps that were asked for."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""


class TargetEngine(ABC):
    """A context manager: what `__enter__` loads or starts, `__exit__` frees or stops."""

    device: str = "cpu"  # where the tensors of its sessions are
    every_tap: ClassVar[bool] = False  # whether it gives taps that are no layer ids, too
    apart: bool = False  # whether it answers prompts one by one, so that some of a group can be asked alone

    @property
    def origin(self) -> str:
        """Name and version of what computes, as manifests keep it; known before anything is loaded."""
        return type(self).__name__

    @property
    @abstractmethod
    def group(self) -> int:
        """How many prompts make a group. Unless they are answered `apart` it is one unit: what is in it
        decides the numerics, so groups are formed from the data alone, never from what was done before."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """How many calls of `hidden_states` it likes to serve at once, from as many threads; 0 for one that
        computes where training does, which is best not interrupted."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""

    def preflight(self) -> None:
        """Raises UserError unless the device that it computes on is there; nothing is loaded or started."""
        return

    @abstractmethod
    def load(self, folder: Path, end_ids: Sequence[int]) -> Self:
        """Binds the target's folder and the ids at which an answer ends; cheap, nothing is loaded yet."""

    @abstractmethod
    def completions(self, groups: Iterable[Group], sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        """Answers by their keys, each as soon as it is there. Groups are begun in order, and fetched as they
        are; `apart`, the next begins while the last ones of the one before are under way."""

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[str],
                 sampling: Sampling) -> list[Completion]:
        """Answers one group of prompts, in order, when all are there. No key twice."""
        found = dict(self.completions([dict(zip(keys, prompts, strict=True))], sampling))
        return [found[key] for key in keys]

    @abstractmethod
    def hidden_states(self, rows: Sequence[Sequence[int]],
                      tap_layers: Sequence[Tap]) -> Iterator[HiddenStates]:
        """Hidden states of every token of every row, in order, in the engine's dtype, on the CPU."""

    @abstractmethod
    def likelihoods(self, rows: Iterable[Sequence[int]]) -> Iterator[list[float]]:
        """For each row, in order, the natural logarithm of the probability that the target gives to each of
        its tokens but the first, behind those before it, at temperature 1."""

    @abstractmethod
    def session(self, tap_layers: Sequence[Tap]) -> Session:
        """A fresh sequence, for draft-and-verify decoding in this process."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None: ...
