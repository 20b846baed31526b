"""The clock of a training run."""

from __future__ import annotations

import time
from typing import Any


class Watch:
    """Seconds and tokens of a run over all its interruptions; the rate leaves the first step out, which
    compiles."""

    def __init__(self, position: dict[str, Any]) -> None:
        self.before, self.start = position["seconds"], time.perf_counter()
        self.tokens = position["tokens"]
        self.warm: tuple[float, int] | None = None  # time and tokens after the first step

    def took(self, tokens: int) -> None:
        self.tokens += tokens
        if self.warm is None:
            self.warm = time.perf_counter(), self.tokens

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.start

    @property
    def rate(self) -> float:
        """Tokens a second; 0 until the second step."""
        then, tokens = self.warm or (self.start, self.tokens)
        return (self.tokens - tokens) / max(time.perf_counter() - then, 1e-9)
