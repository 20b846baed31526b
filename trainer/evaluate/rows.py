"""Rows of measurements, in the field names that published sweeps use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.evaluate.decode import Counts, Decoded
from trainer.evaluate.serving import Measurement
from trainer.records import Completion

NEAR_ONE = 1.05   # an accepted length below: next to no draft is accepted, so that none can save time
FEW_TOKENS = 500  # timed output tokens below which speeds tell more of the machine than of the drafter
FEW_DRAFTS = 200  # counted drafts below which another sample would give another accepted length


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
        return 1 + self.counts.accepted / max(1, self.counts.drafts)


def in_process(base: dict[str, Any], dataset: str, k: int, tally: Tally) -> dict[str, Any]:
    """Acceptance alone: decoding in this process is exact, not fast, so no speed is claimed."""
    counts, drafts = tally.counts, max(1, tally.counts.drafts)
    return {**base, "prompts": tally.prompts, "dataset": dataset, "engine": "in_process",
            "num_speculative_tokens": k, "baseline_tok_s": None, "tok_s": None, "speedup": None,
            "lossless": tally.differing == 0, "drafts": counts.drafts, "output_tokens": tally.output_tokens,
            "mean_accepted_length": round(tally.accepted_length, 4),
            "acceptance_rate": round(counts.accepted / max(1, counts.draft_tokens), 4),
            "per_position_acceptance": [round(count / drafts, 4) for count in counts.per_position]}


def served(base: dict[str, Any], k: int, plain: Measurement, drafted: Measurement,
           lossless: bool, interpreted: bool) -> dict[str, Any]:
    """A speedup is claimed only of accepted drafts and of enough tokens; the speeds stand, but for that of a
    server with `interpreted` kernels, which is no speed of the drafter."""
    telling = drafted.mean_accepted_length >= NEAR_ONE and drafted.output_tokens >= FEW_TOKENS
    speedup = round(drafted.tok_s / plain.tok_s, 3) if telling and not interpreted else None
    return {**base, "dataset": "heldout", "engine": "vllm", "num_speculative_tokens": k,
            "baseline_tok_s": round(plain.tok_s, 2), "interpreted": interpreted,
            "tok_s": None if interpreted else round(drafted.tok_s, 2),
            "speedup": speedup, "lossless": lossless,
            "drafts": drafted.counters.drafts, "output_tokens": drafted.output_tokens,
            "mean_accepted_length": round(drafted.mean_accepted_length, 4),
            "acceptance_rate": round(drafted.acceptance_rate, 4),
            "per_position_acceptance": [round(value, 4) for value in drafted.per_position]}
