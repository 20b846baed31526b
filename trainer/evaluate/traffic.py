"""What to serve each class of traffic with: measured rows -> the best K of a class, K by batch size, doubts.

A class of traffic is a data set, a temperature and a number of users. Rows have the field names of `rows`; of
one drafter and class, those of the same K are repeats. The number of users stands for the batch size, and
between two numbers that were measured the logarithm of the speed-up is taken to change evenly with that of
the batch, with data sets counting alike.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError, first_line
from trainer.evaluate.doubts import Doubts, needs_power_of_two, power_of_two
from trainer.evaluate.tuning import (
    NINETY,
    OFF_LINE,
    Expected,
    Point,
    best,
    expect,
    seen_cost,
    worth_measuring,
)

Row = dict[str, Any]
Lengths = Callable[[str, int], Sequence[int]]  # of a method and its longest measured K: those to choose among

DRAFTER, CLASS = ("model", "method"), ("dataset", "temperature", "users")
SLOW_START = 1.5   # an intercept above is beyond what a drafter's own pass costs beside its target's
BATCHED = 1.05     # what it is where nothing is wrong
STRAY = 3 * OFF_LINE
ROUNDED = 0.02     # what a published accepted length may be off
SAME = 0.005       # speed-ups that differ by less, relative, are worth no other K
PUBLISHED = Doubts(identity_tolerance=0.05, rise_tolerance=0.011, sound=False, prompts=None)  # two digits


def tune(rows: Sequence[Row], lengths: Lengths | None = None) -> dict[str, Any]:
    """What `tuning.json` holds. Without `lengths`, the choices are the K that the rows say are possible, or
    every one up to the longest that was measured. Raises UserError where no row has a speed-up and acceptance
    by position, or one is broken."""
    kept, left_out = usable(rows)
    if not kept:
        reasons = ", ".join(f"{count} with {why}" for why, count in left_out.items()) or "it is empty"
        raise UserError(f"no row of {len(rows)} says what a draft length costs ({reasons}); measure drafted "
                        "and plain speed of the same prompts, of at least 500 tokens each (run=[sweep]; or "
                        "evaluate.server, evaluate.prompts, evaluate.sampling.max_new_tokens)")
    drafters = [_drafter(key, own, lengths) for key, own in grouped(kept, DRAFTER).items()]
    return {"format": 1, "drafters": drafters, "left_out": dict(left_out)}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file: a list of them, or a report that has one. Raises UserError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or first_line(error)}), "
                        "expected the rows of a measurement as JSON; name rows.json of evaluate or sweep, "
                        "or a report.json") from error
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of rows; name rows.json of evaluate or sweep, or a "
                        "report.json")
    return rows


def drafter_of(tuning: dict[str, Any], method: str) -> dict[str, Any]:
    """The tuned drafter of a method; raises UserError unless there is exactly one."""
    found = [each for each in tuning["drafters"] if each["method"] == method]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{each['method']} of {each['model']}" for each in found or tuning["drafters"])
    raise UserError(f"the rows have {'several drafters' if found else 'no drafter'} of the method "
                    f"{method!r}, expected one (there: {there}); give the rows of one drafter, whose method "
                    "is that of the exported folder")


def usable(rows: Sequence[Row]) -> tuple[list[Row], Counter[str]]:
    """The rows with a K, a speed-up and acceptance by position; and how many of the others lack what. Raises
    UserError for values that are none."""
    kept, left_out = [], Counter[str]()
    for number, row in enumerate(rows):
        if (reason := _lacks(row, f"row {number}")) is None:
            kept.append(row)
        else:
            left_out[reason] += 1
    return kept, left_out


def grouped(rows: Iterable[Row], fields: Sequence[str]) -> dict[tuple, list[Row]]:
    """Rows by the values of some fields, None where a row lacks one, in order of appearance."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in fields), []).append(row)
    return found


def points(rows: Sequence[Row]) -> dict[int, Point]:
    """The measured points of one class by K; repeats are averaged, speed-ups by their logarithms."""
    return {k: _mean(k, same) for (k,), same in sorted(grouped(rows, ["num_speculative_tokens"]).items())}


def _lacks(row: Row, where: str) -> str | None:
    k, rates = row.get("num_speculative_tokens"), row.get("per_position_acceptance")
    length = row.get("mean_accepted_length")
    if not k:
        return "no draft length"
    _require(isinstance(k, int) and k > 0, where, "num_speculative_tokens", k, "a count")
    if row.get("engine") == "in_process" or "confidence" in row:
        return "acceptance in process alone"
    if not row.get("baseline_tok_s"):
        return "no plain speed"
    if not row.get("tok_s"):
        return "no drafted speed"
    if row.get("speedup", "") is None:
        return "too few tokens to tell a speed-up"
    if not rates or length is None:
        return "no acceptance by position"
    for name in (*DRAFTER, "dataset"):
        _require(isinstance(row.get(name), str), where, name, row.get(name), "a name")
    users, temperature = row.get("users"), row.get("temperature")
    _require(users is None or (isinstance(users, int) and users > 0), where, "users", users, "a count")
    _require(temperature is None or _number(temperature), where, "temperature", temperature, "a number")
    for name in ("baseline_tok_s", "tok_s"):
        _require(_number(row[name]) and row[name] > 0, where, name, row[name], "a speed above 0")
    _require(_number(length) and 1 <= length <= k + 1 + ROUNDED, where, "mean_accepted_length", length,
             f"1 to K + 1 = {k + 1}")
    _require(isinstance(rates, list) and len(rates) == k and all(_number(each) and 0 <= each <= 1
                                                                for each in rates),
             where, "per_position_acceptance", rates, f"K = {k} shares between 0 and 1")
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, where: str, field: str, found: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"{where}: {field} is {found!r}, expected {expected}; measure it again, or take the "
                        "row out")


def _mean(k: int, rows: Sequence[Row]) -> Point:
    count = len(rows)
    rates = [sum(each) / count for each in zip(*(row["per_position_acceptance"] for row in rows),
                                               strict=True)]
    logs = sum(math.log(row["tok_s"] / row["baseline_tok_s"]) for row in rows)
    return Point(k, tuple(rates), sum(row["mean_accepted_length"] for row in rows) / count,
                 math.exp(logs / count))


def _drafter(key: tuple, rows: list[Row], lengths: Lengths | None) -> Row:
    """What to serve one drafter with, over all its traffic and class by class."""
    longest = max(row["num_speculative_tokens"] for row in rows)
    chosen = list(lengths(str(key[1]), longest) if lengths else
                  rows[0].get("possible_k") or range(1, longest + 1))
    backends = sorted({row["attention_backend"] for row in rows if row.get("attention_backend")})
    doubts = PUBLISHED.warnings(rows)
    if beyond := sorted({row["num_speculative_tokens"] for row in rows} - {*chosen}):
        doubts.append(f"K = {', '.join(map(str, beyond))} was measured, and is none that this drafter has.")
    blamed = [each for each in backends if needs_power_of_two(each)]
    even = [k for k in chosen if power_of_two(k + 1)]
    if blamed and even and even != chosen:
        doubts.append(f"{blamed[0]} is known to verify wrongly where K + 1 is no power of two (some builds); "
                      f"only K = {', '.join(map(str, even))} is chosen from.")
        chosen = even
    classes, expected = [], {}
    by_load = grouped(rows, [name for name in CLASS if name != "users"])
    curves = {load: {k: point.rates for k, point in points(own).items()} for load, own in by_load.items()}
    for group, own in grouped(rows, CLASS).items():
        measured, known = list(points(own).values()), curves[group[:-1]]
        expected[group] = expect(measured, chosen, known)
        classes.append(_class(group, own, measured, expected[group],
                              worth_measuring(measured, chosen, known)))
    return {**dict(zip(DRAFTER, key, strict=True)), **_served(expected, doubts),
            "attention_backends": backends, "classes": classes, "doubts": doubts}


def _served(expected: dict[tuple, list[Expected]], doubts: list[str]) -> Row:
    """What to serve all classes with, and the speed-up that is expected of that; adds to `doubts`."""
    mean = _over(list(expected.values()))
    k = max(mean, key=lambda each: (mean[each], -each))
    schedule = _schedule(expected) or []
    longest = max((each[2] for each in schedule), default=k)
    if not longest:
        return {"speculate": False, "default_k": None, "num_speculative_tokens_per_batch_size": None,
                "speedup": 1.0}
    if not k:
        doubts.append(f"No single K pays for all batches; K = {longest} does for some of them, so serve with "
                      "the schedule or not at all.")
    logs = [{each.k: each.log for each in own}[_at(schedule, group[-1], k)]
            for group, own in expected.items()]
    return {"speculate": True, "default_k": k or longest,
            "num_speculative_tokens_per_batch_size": schedule or None,
            "speedup": round(math.exp(sum(logs) / len(logs)), 3)}


def _at(schedule: list[list[int]], batch: int | None, otherwise: int) -> int:
    """The K of a batch size by the schedule; `otherwise` where no size is known."""
    return next((k for first, last, k in schedule if first <= (batch or 0) <= last), otherwise)


def _class(group: tuple, rows: list[Row], measured: list[Point], expected: list[Expected],
           next_k: tuple[int, float] | None) -> Row:
    found, cost = best(expected), seen_cost(measured)
    more = next_k if next_k and next_k[1] > SAME else None
    return {**dict(zip(CLASS, group, strict=True)), "measured_k": [point.k for point in measured],
            "baseline_tok_s": round(sum(row["baseline_tok_s"] for row in rows) / len(rows), 2),
            "round_cost": {"intercept": round(cost.intercept, 3), "slope": round(cost.slope, 4),
                           "intercept_sd": round(cost.sd(0), 3)},
            **_shown(found), "speculate": bool(found.k), "measure_next": more and more[0],
            "expected": [_shown(each) for each in expected],
            "doubts": _doubts(measured, sum(each.k > 0 for each in expected))}


def _shown(each: Expected) -> Row:
    return {"k": each.k, "accepted_length": round(each.accepted_length, 3), "speedup": round(each.speedup, 3),
            "low": round(each.low, 3), "high": round(each.high, 3), "measured": each.measured}


def _doubts(measured: Sequence[Point], choices: int) -> list[dict[str, str]]:
    """What a class's measurements say of the server rather than of the drafter, each with its kind; `choices`
    are the K that there are."""
    cost, found = seen_cost(measured), []
    if len(measured) == 1:
        found += [("slope", f"only K = {measured[0].k} was measured, so what one more token costs is "
                   "taken to be as elsewhere; measure another K")] if choices > 1 else []
    elif cost.intercept - NINETY * cost.sd(0) > SLOW_START:
        top = max(measured, key=lambda point: point.speedup)
        gain = top.accepted_length / (BATCHED + cost.slope * top.k)
        found.append(("intercept", f"a round costs {cost.intercept:.2f} plain steps before its first draft "
                      "token, where the target needs 1: the serving path does not batch the queries of a "
                      "request (verification runs as a prefill, or without full graphs), which no drafter "
                      f"mends; with another attention backend K = {top.k} could give {gain:.2f}x"))
    for point in measured if len(measured) > 2 else ():
        off = point.cost / cost.at(point.k) - 1
        if abs(off) > STRAY:
            found.append(("stray", f"a round of K = {point.k} costs {abs(off):.0%} "
                          f"{'more' if off > 0 else 'less'} than the other K let expect; measure it again "
                          "before you trust it"))
    return [{"kind": kind, "text": text} for kind, text in found]


def _over(each: Sequence[Sequence[Expected]]) -> dict[int, float]:
    """The mean logarithm of the speed-up by K, over several classes of the same K."""
    return {same[0].k: sum(one.log for one in same) / len(same) for same in zip(*each, strict=True)}


def _schedule(expected: dict[tuple, list[Expected]]) -> list[list[int]] | None:
    """`num_speculative_tokens_per_batch_size` as vLLM reads it (`config/speculative.py`, and
    `v1/spec_decode/dynamic/utils.py`, 0.32): [first batch size, last, K] with both ends in the range, from 1
    on and without overlap; larger batches keep the last K, K = 0 drafts nothing, and a K above
    `num_speculative_tokens` is cut to it. The batch is that of one step, whatever its requests do. None
    where the rows do not say how many users there were."""
    users = sorted({group[-1] for group in expected if group[-1]})
    if not users:
        return None
    means = {count: _over([own for group, own in expected.items() if group[-1] == count]) for count in users}
    ranges: list[list[int]] = []
    for batch in range(1, users[-1] + 1):
        logs = _between(means, batch)
        k = max(logs, key=lambda each: (logs[each], -each))
        if ranges and logs[ranges[-1][2]] >= logs[k] - SAME:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, k])
    return ranges


def _between(means: dict[int, dict[int, float]], batch: int) -> dict[int, float]:
    """The mean by K at a batch size between measured ones; that of the smallest below it."""
    lower = max((count for count in means if count <= batch), default=min(means))
    upper = min(count for count in means if count >= batch)
    if upper <= lower:
        return means[upper]
    weight = math.log(batch / lower) / math.log(upper / lower)
    return {k: (1 - weight) * means[lower][k] + weight * means[upper][k] for k in means[lower]}
