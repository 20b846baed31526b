"""Learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def warmup_cosine(step: int, steps: int, warmup: float, floor: float) -> float:
    """Factor of the peak rate at `step` (0-based) of `steps`: linear over the share `warmup`, then a cosine
    down to `floor`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
