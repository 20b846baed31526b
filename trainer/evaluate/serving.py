"""Speed and acceptance of a running server, and whether a drafter left its answers as they were.

Acceptance is vLLM's own count over the measured requests alone (difference of two readings), by vLLM's
definitions: a draft is one step of one request that had draft tokens to verify; the mean accepted length
includes the bonus token; acceptance by position is cumulative, so 1 + its sum is the mean accepted length.
Requests near their end draft fewer tokens, which moves the acceptance rate with the length of the answers,
hardly the accepted length. Speed is the wall clock from the first request to the last answer, prompts
included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.errors import UserError
from trainer.records import Completion, Sampling


class Counters(Protocol):
    """What a server counts of its speculation since its start; all zero and () without a drafter."""

    @property
    def drafts(self) -> int: ...

    @property
    def draft_tokens(self) -> int: ...

    @property
    def accepted(self) -> int: ...

    @property
    def per_position(self) -> tuple[int, ...]: ...

    def __sub__(self, earlier: Any, /) -> Counters: ...


class Server(Protocol):
    """What is needed of a running server; `k` tokens are drafted a step, None without a drafter."""

    k: int | None

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling,
                 concurrency: int) -> list[Completion]: ...

    def counters(self) -> Counters: ...


@dataclass(frozen=True)
class Measurement:
    """What one pass over the prompts gave. Without a drafter: one token a step, rate 0 and no positions."""

    outputs: list[Completion]
    seconds: float
    output_tokens: int
    tok_s: float
    counters: Counters
    mean_accepted_length: float
    acceptance_rate: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Whether two passes gave the same tokens; if not, how many answers differ and where the first parts."""

    lossless: bool
    differing: int = 0
    prompt: int | None = None
    position: int | None = None


def measure(server: Server, prompts: Sequence[Sequence[int]], sampling: Sampling, users: int,
            warmup: int) -> Measurement:
    """Answers all prompts with `users` in flight, after the first `warmup` prompts once unmeasured."""
    if warmup:
        server.complete(prompts[:warmup], sampling, users)
    before = server.counters()
    start = time.perf_counter()
    outputs = server.complete(prompts, sampling, users)
    seconds = time.perf_counter() - start
    counters = server.counters() - before
    tokens = sum(len(output.tokens) for output in outputs)
    length, rate, per_position = acceptance(counters, server.k or 0)
    return Measurement(outputs, seconds, tokens, tokens / seconds, counters, length, rate, per_position)


def acceptance(counters: Counters, k: int) -> tuple[float, float, tuple[float, ...]]:
    """Mean accepted length, acceptance rate, and cumulative acceptance at each of the `k` positions."""
    counts = counters.per_position + (0,) * (k - len(counters.per_position))
    if counters.drafts == 0:
        return 1.0, 0.0, (0.0,) * len(counts)
    length = 1 + counters.accepted / counters.drafts
    per_position = tuple(count / counters.drafts for count in counts)
    return length, counters.accepted / counters.draft_tokens, per_position


def compare(plain: Measurement, drafted: Measurement) -> Comparison:
    """Compares the tokens of a pass without a drafter with those of a pass with one, over the same prompts.

    Only greedy answers in float32 can be expected to be equal. Raises UserError if the first had a drafter.
    """
    if plain.counters.drafts:
        raise UserError("the server of the plain measurement drafted as well, so there is nothing to compare "
                        "with: start it without --speculative-config.")
    pairs = [(one.tokens, other.tokens) for one, other in zip(plain.outputs, drafted.outputs, strict=True)]
    differing = [index for index, (one, other) in enumerate(pairs) if one != other]
    if not differing:
        return Comparison(lossless=True)
    one, other = pairs[differing[0]]
    same = next((place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
                min(len(one), len(other)))
    return Comparison(False, len(differing), differing[0], same)
