"""How fast a drafter is with drafts of any length K, from the few lengths that were measured.

A round of drafting and verifying costs accepted length / speed-up, counted in plain decoding steps, and a
straight line a + b*K fits it: a = 1 is the one step of the target that nothing can save, b what one more
token costs to draft and to verify. Accepted length is 1 + the sum of the acceptance by position (cumulative,
as vLLM counts it), which is extended to other K by what each position keeps of the one before. Both are
estimated with what published sweeps have in common as a prior, so that one measured K says something and
three say nearly all; what is expected of a K is told with an interval.

Speed-ups are compared as logarithms; K = 0 is plain decoding, exactly 1. Nothing here reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Rates = tuple[float, ...]  # cumulative acceptance of positions 1, 2, ...

# What 64 published sweeps (six targets, five methods, GPUs) have in common, as mean and standard deviation.
INTERCEPT, SLOPE = (1.4, 1.0), (0.2, 0.2)  # of the line, in plain steps and in plain steps a token
OFF_LINE = 0.04   # what the cost of a K is off its line, relative
REPEATED = 0.01   # how well a measured speed-up repeats, relative
KEPT, FADING = (0.88, 0.05), (-0.01, 0.01)  # share of a position that the next one keeps, and its change
COUNTED = 0.02    # how well such a share is known, at the first position
GUESSED = 0.02    # what one position after the last measured one adds to the doubt
MOVED = 0.01      # what an accepted length is off between two measured K, relative
NINETY = 1.645    # standard deviations on either side of a 90 % interval


@dataclass(frozen=True)
class Point:
    """What was measured with drafts of `k` tokens; the speed-up is over plain decoding of the same."""

    k: int
    rates: Rates
    accepted_length: float
    speedup: float

    @property
    def cost(self) -> float:
        """Of one round, in plain decoding steps."""
        return self.accepted_length / self.speedup


@dataclass(frozen=True)
class Line:
    """intercept + slope * x, with the covariance of the two, 2 x 2."""

    intercept: float
    slope: float
    covariance: np.ndarray

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    def sd(self, x: float) -> float:
        """How well the line is known at `x`, as a standard deviation."""
        return math.sqrt(np.array([1.0, x]) @ self.covariance @ [1.0, x])


@dataclass(frozen=True)
class Expected:
    """What drafts of `k` tokens come to: the logarithm of the speed-up and its standard deviation."""

    k: int
    accepted_length: float
    log: float
    sd: float
    measured: bool

    @property
    def speedup(self) -> float:
        return math.exp(self.log)

    @property
    def low(self) -> float:
        """With `high`, nine of ten measured speed-ups lie between."""
        return math.exp(self.log - NINETY * self.sd)

    @property
    def high(self) -> float:
        return math.exp(self.log + NINETY * self.sd)


PLAIN = Expected(0, 1.0, 0.0, 0.0, True)


def round_cost(points: Sequence[Point]) -> Line:
    """The line that the cost of a round follows, in plain steps over K; without points, the usual one."""
    costs = np.array([point.cost for point in points])
    certainty = np.full(len(points), 1 / (math.hypot(OFF_LINE, REPEATED) * level(points)) ** 2)
    return _line([point.k for point in points], costs, certainty, INTERCEPT, SLOPE)


def seen_cost(points: Sequence[Point]) -> Line:
    """The same by least squares, with no prior, where three K or more say it: what the server itself does."""
    if len(points) < 3:
        return round_cost(points)
    costs = np.array([point.cost for point in points])
    certainty = np.full(len(points), 1 / (OFF_LINE * level(points)) ** 2)
    return _line([point.k for point in points], costs, certainty, (0.0, 1e3), (0.0, 1e3))


def level(points: Sequence[Point]) -> float:
    """The mean cost of a round, by which deviations from the line are measured."""
    return sum(point.cost for point in points) / len(points) if points else INTERCEPT[0]


def speedup(rates: Sequence[float], cost: Line) -> float:
    """Of drafts with one position for each of `rates`; no draft gives exactly 1."""
    return (1 + sum(rates)) / _cost_at(cost, len(rates)) if len(rates) else 1.0


def extended(curves: Mapping[int, Sequence[float]], k: int) -> tuple[Rates, float]:
    """The acceptance of `k` positions, and the standard deviation of the accepted length, from curves by
    their K. Between two K both have a say, since acceptance moves a little with K; below all, the shortest
    has; above all, the longest is continued."""
    if k in curves:
        return tuple(curves[k]), 0.0
    above, below = ([each for each in curves if each > k], [each for each in curves if each < k])
    if not above:
        return _continued(curves[max(below)] if below else (), k)
    longer = list(curves[min(above)])
    rates = longer[:k]
    if below:
        end = max(below)
        weight = (k - end) / (min(above) - end)
        scale = curves[end][-1] / longer[end - 1] if longer[end - 1] else 0.0
        shorter = [*curves[end], *(min(curves[end][-1], rate * scale) for rate in longer[end:k])]
        rates = [(1 - weight) * one + weight * other for one, other in zip(shorter, rates, strict=True)]
    return tuple(rates), MOVED * (1 + sum(rates))


def expect(points: Sequence[Point], lengths: Sequence[int],
           curves: Mapping[int, Sequence[float]] | None = None) -> list[Expected]:
    """What each of `lengths` comes to, plain decoding first. `curves` has acceptance that was counted under
    another load, which it does not depend on."""
    cost, measured = round_cost(points), {point.k: point for point in points}
    known = {**(curves or {}), **{point.k: point.rates for point in points}}
    found = [PLAIN]
    for k in lengths:
        if k in measured:
            point = measured[k]
            found.append(Expected(k, point.accepted_length, math.log(point.speedup), REPEATED, True))
            continue
        rates, sd = extended(known, k)
        length = 1 + sum(rates)
        off = math.hypot(cost.sd(k), OFF_LINE * level(points)) / _cost_at(cost, k)
        found.append(Expected(k, length, math.log(speedup(rates, cost)), math.hypot(off, sd / length), False))
    return found


def best(expected: Sequence[Expected]) -> Expected:
    """The one to serve with; plain decoding where no draft is expected to beat it."""
    return max(expected, key=lambda each: (each.log, -each.k))


def worth_measuring(points: Sequence[Point], lengths: Sequence[int],
                    curves: Mapping[int, Sequence[float]] | None = None) -> tuple[int, float] | None:
    """The K among `lengths` that promises most over the best one so far, and how much of its speed-up it adds
    on average (expected improvement); None when all are measured. Without points: the K to begin with."""
    expected = expect(points, lengths, curves)
    incumbent = max(each.log for each in expected if each.measured)
    promised = {each.k: _improvement(each, incumbent) for each in expected if not each.measured}
    return max(promised.items(), key=lambda item: (item[1], -item[0]), default=None)


def replay(series: Mapping[int, Point], budget: int) -> tuple[int, list[int]]:
    """The K that is settled on after at most `budget` of a series were measured, one after another, and those
    in their order. Only the measured points are looked at."""
    order: list[int] = []
    lengths = sorted(series)
    while len(order) < budget and (found := worth_measuring([series[k] for k in order], lengths)):
        order.append(found[0])
    return best(expect([series[k] for k in order], lengths)).k, order


def _cost_at(cost: Line, k: int) -> float:
    """A round verifies with the target, so it is never taken to cost less than one of its steps."""
    return max(1.0, cost.at(k))


def _continued(rates: Sequence[float], k: int) -> tuple[Rates, float]:
    """`rates` with positions up to `k` after them, each keeping a share of the one before that follows a line
    over the positions; and the standard deviation of 1 + their sum."""
    reached = [1.0, *rates[:-1]][:len(rates)]
    shares = [min(1.0, rate / before) if before else 0.0 for rate, before in zip(rates, reached, strict=True)]
    line = _line(range(len(rates)), np.array(shares), np.array(reached) / COUNTED ** 2, KEPT, FADING)
    found, doubt, total = list(rates), 0.0, 0.0
    for place in range(len(rates), k):
        share = min(1.0, max(0.0, line.at(place)))
        found.append((found[-1] if found else 1.0) * share)
        doubt += (line.sd(place) + GUESSED) ** 2 / max(0.1, share) ** 2
        total += found[-1] * math.sqrt(doubt)
    return tuple(found), total


def _line(x: Sequence[float], y: np.ndarray, certainty: np.ndarray, intercept: tuple[float, float],
          slope: tuple[float, float]) -> Line:
    """Bayesian linear regression: `certainty` is 1 / variance of each y; the prior as mean and deviation."""
    design = np.column_stack([np.ones(len(x)), np.asarray(x, dtype=float)])
    prior = np.diag([1 / intercept[1] ** 2, 1 / slope[1] ** 2])
    covariance = np.linalg.inv(prior + design.T * certainty @ design)
    mean = covariance @ (prior @ [intercept[0], slope[0]] + design.T @ (certainty * y))
    return Line(float(mean[0]), float(mean[1]), covariance)


def _improvement(each: Expected, incumbent: float) -> float:
    z = (each.log - incumbent) / each.sd
    return each.sd * (z * 0.5 * (1 + math.erf(z / math.sqrt(2)))
                      + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
