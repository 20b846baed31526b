"""Arms that are timed in turns, so that what the machine does meanwhile falls on all of them alike.

Imports nothing but the standard library, since tools that run in vLLM's environment use it as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]


def in_turns(arms: dict[str, Call], rounds: int, seconds: Callable[[Call], float]) -> dict[str, list[float]]:
    """Those of every arm in every round, as `seconds` has them of a call, after one round that does not
    count. Each round begins with another arm."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds + 1):
        for name in names[number % len(names):] + names[:number % len(names)]:
            took = seconds(arms[name])
            if number:
                found[name].append(took)
    return found


def by(clock: Callable[[], float]) -> Callable[[Call], float]:
    """The seconds of a call by this clock."""
    def seconds(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(base: list[float], own: list[float]) -> dict[str, float]:
    """Speed against a base, round by round."""
    return spread([one / other for one, other in zip(base, own, strict=True)])
