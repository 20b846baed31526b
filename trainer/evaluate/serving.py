"""Speed and acceptance of a running server, and whether a drafter left its answers as they were.

Acceptance is vLLM's own count over the measured requests alone (difference of two readings), by vLLM's
definitions: a draft is one step of one request that had draft tokens to verify; the mean accepted length
includes the bonus token; acceptance by position is cumulative, so 1 + its sum is the mean accepted length.
Requests near their end draft fewer tokens, which moves the acceptance rate with the length of the answers,
hardly the accepted length. Speed is the wall clock from the first request to the last answer of every turn,
prompts included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from trainer.errors import UserError
from trainer.records import Completion, Sampling

IDLE_SECONDS = 1.5  # after its last request a server's worker looks for another one, busily, for a second


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


class Starting(Protocol):
    """A server that may be given up while it starts, from another thread."""

    abandoned: bool

    def __enter__(self) -> Any: ...


@dataclass(frozen=True)
class Measurement:
    """What the prompts gave, `turns` being the speeds of the turns that were taken. Without a drafter: one
    token a step, rate 0 and no positions."""

    outputs: list[Completion]
    seconds: float
    output_tokens: int
    tok_s: float
    counters: Counters
    mean_accepted_length: float
    acceptance_rate: float
    per_position: tuple[float, ...]
    turns: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Whether two passes gave the same tokens; if not, how many answers differ and where the first parts."""

    lossless: bool
    differing: int = 0
    prompt: int | None = None
    position: int | None = None


def enter(servers: Sequence[Starting]) -> None:
    """Enters all servers at once, since most of a start is importing, on one core. When one fails or the run
    is stopped, the others are given up; the caller exits every one, started or not."""
    with ThreadPoolExecutor(len(servers)) as threads:
        try:
            for entered in as_completed([threads.submit(server.__enter__) for server in servers]):
                entered.result()
        except BaseException:
            for server in servers:
                server.abandoned = True
            raise


def measure(servers: Sequence[Server], prompts: Sequence[Sequence[int]], sampling: Sampling, users: int,
            warmup: int, rounds: int) -> list[Measurement]:
    """Has each server answer all prompts with `users` in flight, after the first `warmup` prompts unmeasured.

    The servers take turns, `rounds` of them, each with its share of the prompts and in alternating order, so
    that a machine that gets slower or faster meanwhile does so for all of them.
    """
    turns = [(prompts[len(prompts) * turn // rounds:len(prompts) * (turn + 1) // rounds], sampling)
             for turn in range(rounds)]
    return _taken(servers, [each for each in turns if each[0]], users, prompts[:warmup])


def repeat(servers: Sequence[Server], prompts: Sequence[Sequence[int]], sampling: Sampling, users: int,
           warmup: int, repeats: int) -> list[Measurement]:
    """The same with all prompts in each of `repeats` turns: the speed is the median of the turns, all else is
    of all together. What is sampled is drawn anew in every turn."""
    turns = [(prompts, replace(sampling, seed=sampling.seed + turn)) for turn in range(repeats)]
    found = _taken(servers, turns, users, prompts[:warmup])
    return [replace(each, tok_s=median(each.turns)) for each in found]


def _taken(servers: Sequence[Server], turns: Sequence[tuple[Sequence[Sequence[int]], Sampling]], users: int,
           warmup: Sequence[Sequence[int]]) -> list[Measurement]:
    for server in servers if warmup else ():
        server.complete(warmup, turns[0][1], users)
    before = [server.counters() for server in servers]
    passes: list[list[tuple[list[Completion], float]]] = [[] for _ in servers]
    for number, (part, sampling) in enumerate(turns):
        for place in (range(len(servers)) if number % 2 == 0 else reversed(range(len(servers)))):
            if len(servers) > 1:
                time.sleep(IDLE_SECONDS)
            start = time.perf_counter()
            answers = servers[place].complete(part, sampling, users)
            passes[place].append((answers, time.perf_counter() - start))
            if len(turns) > 1:  # a bar that is drawn meanwhile would take its share of what is measured
                _tell(servers[place], number, len(turns), *passes[place][-1])
    counters = [server.counters() - one for server, one in zip(servers, before, strict=True)]
    return [_measurement(*each) for each in zip(servers, passes, counters, strict=True)]


def _tell(server: Server, turn: int, turns: int, answers: list[Completion], seconds: float) -> None:
    speed = sum(len(answer.tokens) for answer in answers) / seconds
    print(f"{'plain' if server.k is None else f'K={server.k}'} on vLLM: turn {turn + 1} of {turns}, "
          f"{speed:.1f} tokens/s", flush=True)


def _measurement(server: Server, passes: list[tuple[list[Completion], float]],
                 counters: Counters) -> Measurement:
    outputs = [output for answers, _ in passes for output in answers]
    tokens, seconds = sum(len(output.tokens) for output in outputs), sum(each for _, each in passes)
    length, rate, per_position = acceptance(counters, server.k or 0)
    turns = tuple(sum(len(output.tokens) for output in answers) / each for answers, each in passes)
    return Measurement(outputs, seconds, tokens, tokens / seconds, counters, length, rate, per_position,
                       turns)


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
