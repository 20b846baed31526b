"""What a sweep has measured so far, cell by cell on the disk, and the rows that it comes to.

A cell is one class of traffic on the servers that took turns: a plain one and one with a drafter, or one of
them alone where memory forbids both. It is written whole when it is measured, so that a killed sweep goes on
with the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainer.errors import UserError, first_line
from trainer.evaluate.rows import speeds
from trainer.evaluate.serving import Measurement


@dataclass(frozen=True)
class Variant:
    """What a server drafts: `k` tokens a step by `method`; `PLAIN`: nothing."""

    method: str
    k: int

    def __str__(self) -> str:
        return f"{self.method} K={self.k}" if self.k else self.method


PLAIN = Variant("plain", 0)


@dataclass(frozen=True)
class Traffic:
    """A class of traffic: prompts of one kind, so many users at a time, and how they sample."""

    dataset: str
    users: int
    temperature: float


@dataclass(frozen=True)
class Pass:
    """What one server did of a cell. `turns`: output tokens a second in each repeat; `ms_per_token`: what a
    user waits for a token, the median over the requests; `texts`: a checksum of the tokens of each answer."""

    variant: Variant
    turns: list[float]
    output_tokens: int
    ms_per_token: float | None
    texts: list[str]
    drafts: int
    mean_accepted_length: float
    acceptance_rate: float
    per_position: list[float]
    server: dict[str, Any]  # vllm, attention_backend, interpreted

    @classmethod
    def of(cls, variant: Variant, found: Measurement, server: dict[str, Any]) -> Pass:
        waited = [1000 * each.seconds / len(each.tokens) for each in found.outputs if each.tokens]
        texts = [hashlib.sha256(repr(each.tokens).encode()).hexdigest()[:16] for each in found.outputs]
        return cls(variant, list(found.turns), found.output_tokens, median(waited) if waited else None, texts,
                   found.counters.drafts, found.mean_accepted_length, found.acceptance_rate,
                   list(found.per_position), server)


Cell = dict[Variant, Pass]
Key = tuple[Traffic, tuple[Variant, ...]]


class Cells:
    """The cells in a file, which is made by the first. A torn last line, as a killed sweep leaves it, is cut
    off; UserError for a broken one before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[Key, Cell] = {}
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                self._keep(*_parsed(line))
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path}, line {number}: is no cell of a sweep ({first_line(error)}); remove "
                                "this line, and run the same command again") from error
        if whole < len(content):
            os.truncate(path, whole)

    def has(self, traffic: Traffic, variants: Sequence[Variant]) -> bool:
        return (traffic, tuple(variants)) in self.cells

    def add(self, traffic: Traffic, passes: Sequence[Pass]) -> None:
        """On the disk when it returns."""
        with self.path.open("a") as file:
            file.write(json.dumps({**asdict(traffic), "passes": [asdict(each) for each in passes]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(traffic, passes)

    def pair(self, traffic: Traffic, variant: Variant) -> tuple[Pass, Pass, bool]:
        """Plain decoding and a variant of the same traffic, and whether they took turns."""
        both = self.cells.get((traffic, (PLAIN, variant)))
        if both is not None:
            return both[PLAIN], both[variant], True
        return self.cells[traffic, (PLAIN,)][PLAIN], self.cells[traffic, (variant,)][variant], False

    def _keep(self, traffic: Traffic, passes: Sequence[Pass]) -> None:
        cell = {each.variant: each for each in passes}
        self.cells[traffic, tuple(cell)] = cell


def row(base: dict[str, Any], traffic: Traffic, plain: Pass, drafted: Pass,
        interleaved: bool) -> dict[str, Any]:
    """The row of a variant beside plain decoding. Speeds are medians of the repeats; whether the texts are
    the same is known of greedy ones alone."""
    differing = sum(one != other for one, other in zip(plain.texts, drafted.texts, strict=True))
    greedy = traffic.temperature == 0
    found = speeds(median(plain.turns), median(drafted.turns), drafted.output_tokens,
                   drafted.mean_accepted_length, drafted.server["interpreted"])
    return {**base, "method": drafted.variant.method, **asdict(traffic), "engine": "vllm", **drafted.server,
            "num_speculative_tokens": drafted.variant.k, **found,
            "mean_accepted_length": round(drafted.mean_accepted_length, 4),
            "acceptance_rate": round(drafted.acceptance_rate, 4),
            "per_position_acceptance": [round(value, 4) for value in drafted.per_position],
            "lossless": differing == 0 if greedy else None, "differing": differing if greedy else None,
            "drafts": drafted.drafts, "output_tokens": drafted.output_tokens,
            "repeats": len(drafted.turns), "interleaved": interleaved,
            "baseline_tok_s_repeats": [round(each, 2) for each in plain.turns],
            "tok_s_repeats": [] if found["interpreted"] else [round(each, 2) for each in drafted.turns],
            "baseline_ms_per_token": _rounded(plain.ms_per_token),
            "ms_per_token": None if found["interpreted"] else _rounded(drafted.ms_per_token)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _parsed(line: bytes) -> tuple[Traffic, list[Pass]]:
    content = json.loads(line)
    passes = [Pass(**{**each, "variant": Variant(**each["variant"])}) for each in content.pop("passes")]
    return Traffic(**content), passes
