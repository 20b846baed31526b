"""Rows of measurements, in the field names that published sweeps use."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from trainer.evaluate.decode import Counts, Decoded, Selection
from trainer.evaluate.doubts import NEAR_ONE
from trainer.evaluate.serving import Measurement
from trainer.records import Completion

FEW_TOKENS = 500  # timed output tokens below which speeds tell more of the machine than of the drafter


@dataclass
class Tally:
    """What decoding a group of prompts in this process came to, beside the target's own answers."""

    counts: Counts = field(default_factory=Counts)
    prompts: int = 0
    output_tokens: int = 0
    differing: int = 0

    def add(self, decoded: Decoded, plain: Completion) -> None:
        self.counts.add(decoded.counts)
        self.prompts += 1
        self.output_tokens += len(decoded.tokens)
        self.differing += decoded.tokens != plain.tokens

    @property
    def accepted_length(self) -> float:
        return self.counts.accepted_length


def label(selection: Selection | None) -> str:
    """Where and how was decoded, in words."""
    return "in process" if selection is None else f"in process, confidence {selection.threshold:g}"


def in_process(base: dict[str, Any], dataset: str, k: int, tally: Tally,
               selection: Selection | None = None) -> dict[str, Any]:
    """Acceptance alone: decoding in this process is exact, not fast, so no speed is claimed. With a selection
    the engine is named by it, and the draft tokens that a step verified are told."""
    counts, drafts = tally.counts, max(1, tally.counts.drafts)
    own = {} if selection is None else {"confidence": selection.threshold,
                                        "verified_tokens": round(counts.draft_tokens / drafts, 4)}
    return {**base, **own, "prompts": tally.prompts, "dataset": dataset,
            "engine": "in_process" if selection is None else label(selection),
            "num_speculative_tokens": k, "baseline_tok_s": None, "tok_s": None, "speedup": None,
            "lossless": tally.differing == 0, "drafts": counts.drafts, "output_tokens": tally.output_tokens,
            "mean_accepted_length": round(tally.accepted_length, 4),
            "acceptance_rate": round(counts.accepted / max(1, counts.draft_tokens), 4),
            "per_position_acceptance": [round(count / drafts, 4) for count in counts.per_position]}


def served(base: dict[str, Any], k: int, plain: Measurement, drafted: Measurement,
           lossless: bool, interpreted: bool) -> dict[str, Any]:
    """What a server with a drafter measured, beside one without."""
    return {**base, "dataset": "heldout", "engine": "vllm", "num_speculative_tokens": k,
            "lossless": lossless, **speeds(plain.tok_s, drafted.tok_s, drafted.output_tokens,
                                           drafted.mean_accepted_length, interpreted),
            "drafts": drafted.counters.drafts, "output_tokens": drafted.output_tokens,
            "mean_accepted_length": round(drafted.mean_accepted_length, 4),
            "acceptance_rate": round(drafted.acceptance_rate, 4),
            "per_position_acceptance": [round(value, 4) for value in drafted.per_position]}


def speeds(plain: float, drafted: float, output_tokens: int, accepted_length: float,
           interpreted: bool) -> dict[str, Any]:
    """Of enough tokens a slow-down is told always, a speedup only of accepted drafts; the speeds stand, but
    for that of a server with `interpreted` kernels, which is no speed of the drafter."""
    speedup = round(drafted / plain, 3)
    told = output_tokens >= FEW_TOKENS and not interpreted and (accepted_length >= NEAR_ONE or speedup < 1)
    return {"baseline_tok_s": round(plain, 2), "interpreted": interpreted,
            "tok_s": None if interpreted else round(drafted, 2), "speedup": speedup if told else None}


def position_gaps(here: dict[str, Any], there: dict[str, Any]) -> list[tuple[float, str]]:
    """For each position the relative gap of the accepted length up to it, 1 + p_1 + ... + p_j, of the row
    `there` to that of `here`, and what was compared, in words. A position that is hardly reached counts as
    little as it adds to the length; of a rate alone, one draft more would be a large share."""
    lengths = zip(*(accumulate(row["per_position_acceptance"], initial=1.0) for row in (here, there)),
                  strict=True)
    return [(abs(other / own - 1), f"K={here['num_speculative_tokens']}, positions 1 to {place}: {own:.3f} "
             f"in process, {other:.3f} served") for place, (own, other) in enumerate(lengths) if place]
