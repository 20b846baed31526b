"""Rows of measurements, in the field names that published sweeps use."""

from __future__ import annotations

from typing import Any

from trainer.evaluate.decode import Counts
from trainer.evaluate.serving import Measurement


def in_process(base: dict[str, Any], dataset: str, k: int, counts: Counts, lossless: bool) -> dict[str, Any]:
    """Acceptance alone: decoding in this process is exact, not fast, so no speed is claimed."""
    drafts = max(1, counts.drafts)
    return {**base, "dataset": dataset, "engine": "in_process", "num_speculative_tokens": k,
            "baseline_tok_s": None, "tok_s": None, "speedup": None, "lossless": lossless,
            "drafts": counts.drafts,
            "mean_accepted_length": round(1 + counts.accepted / drafts, 4),
            "acceptance_rate": round(counts.accepted / max(1, counts.draft_tokens), 4),
            "per_position_acceptance": [round(count / drafts, 4) for count in counts.per_position]}


def served(base: dict[str, Any], k: int, plain: Measurement, drafted: Measurement,
           lossless: bool) -> dict[str, Any]:
    return {**base, "dataset": "heldout", "engine": "vllm", "num_speculative_tokens": k,
            "baseline_tok_s": round(plain.tok_s, 2), "tok_s": round(drafted.tok_s, 2),
            "speedup": round(drafted.tok_s / plain.tok_s, 3), "lossless": lossless,
            "drafts": drafted.counters.drafts, "output_tokens": drafted.output_tokens,
            "mean_accepted_length": round(drafted.mean_accepted_length, 4),
            "acceptance_rate": round(drafted.acceptance_rate, 4),
            "per_position_acceptance": [round(value, 4) for value in drafted.per_position]}
