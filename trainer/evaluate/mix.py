"""A user's own mix of traffic, and what a drafter accepts of it.

Weights say how much of the output is of each slice, `{category: {code: 3, chat: 1}}`. Weights of several
kinds multiply, and a slice that is not named among others of its kind is no part of the mix. The accepted
length of a mix is its tokens over its steps: a share w of the tokens takes w / L steps where L tokens come of
a step, so that slices count by their harmonic mean, as they do where all prompts are counted together.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from math import prod

from trainer.data.slices import KINDS, Slices, label, ordered
from trainer.errors import UserError
from trainer.evaluate.decode import Counts
from trainer.ranges import NotNegative

Weights = dict[str, dict[str, NotNegative]]  # by kind, by slice
Part = tuple[Slices, Counts]  # of one answer


def weights_problems(weights: Weights) -> dict[str, str]:
    """By key what is wrong with weights, whatever there is to be measured."""
    found = {f"weights.{kind}": f"is no kind of slice{_nearest(kind, KINDS)}; kinds: {', '.join(KINDS)}"
             for kind in weights if kind not in KINDS}
    return found | {f"weights.{kind}": "gives no slice a weight above 0, so nothing would count"
                    for kind, names in weights.items() if kind in KINDS and not any(names.values())}


def require_slices(weights: Weights, key: str, chosen: Collection[Slices], all_of: Collection[Slices],
                   more: str) -> None:
    """Raises UserError unless each slice with a weight is among those of the `chosen` answers. `all_of` are
    those that could have been chosen, had the setting `more` asked for as many."""
    for kind, names in weights.items():
        there, known = ({each[kind] for each in found} for found in (chosen, all_of))
        for name in (str(name) for name, weight in names.items() if weight):
            if name in there:
                continue
            if name in known:
                raise UserError(f"{key} weighs the {kind} {name!r}, but none of the {len(chosen)} answers "
                                f"that are measured is of it; raise {more}, which chooses them")
            listed = ", ".join(ordered(kind, known)) or "none at all"
            raise UserError(f"{key} weighs the {kind} {name!r}, but no held-out answer is of it"
                            f"{_nearest(name, known)} (there: {listed}); name one that is there, or hold out "
                            "prompts of it (prompts.heldout)")
    if weights and not any(weight(weights, slices) for slices in chosen):
        raise UserError(f"{key} leaves no weight to any of the {len(chosen)} answers that are measured: none "
                        f"is in slices of {' and '.join(weights)} that count; give weights of one kind")


def weight(weights: Weights, slices: Slices) -> float:
    """That of an answer; 1 without weights."""
    return prod({str(name): share for name, share in names.items()}.get(slices[kind], 0.0)
                for kind, names in weights.items())


def cell(weights: Weights, slices: Slices) -> tuple[str, ...]:
    """What is weighed alike."""
    return tuple(slices[kind] for kind in weights)


def mixed(weights: Weights, parts: Iterable[Part]) -> float | None:
    """The accepted length of the mix; None without weights."""
    if not weights:
        return None
    cells: dict[tuple[str, ...], tuple[float, Counts]] = {}
    for slices, counts in parts:
        cells.setdefault(cell(weights, slices), (weight(weights, slices), Counts()))[1].add(counts)
    steps = sum(share / counts.accepted_length for share, counts in cells.values())
    return sum(share for share, _ in cells.values()) / steps


def lengths(parts: Sequence[Part], kinds: Iterable[str]) -> dict[str, float]:
    """The accepted length of each slice of these kinds, by its name."""
    found = {}
    for kind in kinds:
        for name in ordered(kind, [slices[kind] for slices, _ in parts]):
            total = Counts()
            for slices, counts in parts:
                if slices[kind] == name:
                    total.add(counts)
            found[label(kind, name)] = total.accepted_length
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], 1)
    return f"; nearest: {close[0]}" if close else ""
