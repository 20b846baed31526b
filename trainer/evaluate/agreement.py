"""Gates on the same drafts, verified in this process and on a server."""

from __future__ import annotations

from typing import Any

from trainer.evaluate import rows
from trainer.gates import Gate


def agreement_gates(pairs: list[tuple[dict[str, Any], dict[str, Any]]], bound: float) -> list[Gate]:
    """Whether the server accepts as this process does: `pairs` are rows of both of the same drafts, whose
    texts are equal, so that only drafts which the end of an answer cuts short can part them."""
    gap = max(abs(there["mean_accepted_length"] / here["mean_accepted_length"] - 1) for here, there in pairs)
    worst, compared = max(each for pair in pairs for each in rows.position_gaps(*pair))
    return [
        Gate("served_accepted_length_gap", gap, bound, "<=", "the server accepts another number of tokens "
             "than this process from the same folder: layer ids, mask token, rope or causality are read "
             "differently"),
        Gate("served_acceptance_by_position_gap", worst, bound, "<=", "the server accepts at other positions "
             f"of a draft than this process ({compared}): at the first one the target's states or the "
             "folder are read differently, behind it what a step hands to the next (state, token, position, "
             "keys of the draft)")]
