"""How far given answers are from what the target would say: its own likelihood of them.

A drafter learns to guess the target. From answers that another model or a person wrote it learns to guess
those, and what it accepts in training it does not accept when it serves. The measure is the perplexity of the
supervised tokens, exp of the mean negative log-likelihood at temperature 1: 1 where the target is sure of
every token.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from trainer.data.response_rows import Row, mask_of
from trainer.engines.base import TargetEngine
from trainer.progress import Progress
from trainer.ranges import Above, Count
from trainer.target import Target

WORST = 5  # rows that are named


@dataclass(frozen=True)
class OffPolicy:
    """Of `rows` rows, chosen by the hashes of their ids, what the target on `engine` says; with a warning
    where the perplexity is above `warn_above`."""

    rows: Count
    warn_above: Annotated[float, Above(1)]
    engine: TargetEngine

    def measure(self, rows: Iterable[Row], target: Target) -> dict[str, Any] | None:
        """For the report; None where no row can be looked at, as each is too long or has no answer."""
        chosen = heapq.nsmallest(self.rows, (row for row in rows if self._suits(row)), key=_hash)
        if not chosen:
            return None
        ids = [row["prompt"] + row["tokens"] for row in chosen]
        scores: list[tuple[str, float, int]] = []
        with self.engine.load(target.folder, target.end_ids) as engine, \
                Progress("off-policy score", total=len(ids), unit="rows") as bar:
            for row, found in zip(chosen, engine.likelihoods(ids), strict=True):
                own = [value for value, learnt in zip(found, mask_of(row)[1:], strict=True) if learnt]
                scores.append((row["id"], sum(own), len(own)))
                bar.advance(1)
        return self._told(scores)

    def _suits(self, row: Row) -> bool:
        mask = mask_of(row)
        return len(mask) < self.engine.max_length and any(mask[1:])

    def _told(self, scores: list[tuple[str, float, int]]) -> dict[str, Any]:
        tokens = sum(count for *_, count in scores)
        mean = sum(total for _, total, _ in scores) / tokens
        each = {name: math.exp(min(700.0, -total / count)) for name, total, count in scores}
        found = {"rows": len(scores), "tokens": tokens, "mean_log_likelihood": mean,
                 "perplexity": math.exp(min(700.0, -mean)), "warn_above": self.warn_above,
                 "rows_above": sum(value > self.warn_above for value in each.values()),
                 "worst": [{"id": name, "perplexity": value} for name, value in
                           heapq.nlargest(WORST, each.items(), key=lambda item: item[1])]}
        print(f"off-policy score: perplexity {found['perplexity']:.2f} of the target on {tokens:,} "
              f"supervised tokens of {len(scores)} rows; {found['rows_above']} rows are above "
              f"{self.warn_above:g}", flush=True)
        if found["perplexity"] > self.warn_above:
            print("warning: the given answers are not what the target would say (perplexity "
                  f"{found['perplexity']:.2f}, responses.off_policy.warn_above={self.warn_above:g}): a "
                  "drafter that learns them accepts less than its training shows; responses=regenerate has "
                  "the target answer", flush=True)
        return found


def _hash(row: Row) -> bytes:
    return hashlib.sha256(row["id"].encode()).digest()
