"""A sweep as its page shows it: target by target, then drafter by drafter, each figure beside its numbers.

Rows have the field names of `rows`; a class of traffic is what `traffic` takes it for. Rows that say nothing
of speed stand in the tables and are counted; nothing is filled in for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import UserError
from trainer.evaluate import figures, sweep_figures
from trainer.evaluate.doubts import single_prompts
from trainer.evaluate.figures import Drawing
from trainer.evaluate.sweep_figures import Fit, Speed
from trainer.evaluate.traffic import CLASS, DRAFTER, Row, grouped, points, tune, usable
from trainer.evaluate.tuning_table import recommendation

K = "num_speculative_tokens"
OPEN = 4  # drafters up to which each is shown at once; with more, each is folded
UNNAMED = "all traffic"
NO_BASELINE = ("No row says how fast its drafter and plain decoding are, so nothing is said of speed-ups; "
               "measure both, of the same prompts (run=[sweep]).")


def view(rows: Sequence[Row]) -> dict[str, Any]:
    """What the template of a sweep shows; figures are `<svg>` elements. Raises UserError for a row that says
    neither what was served nor on which data, or whose values are none."""
    import matplotlib

    require_names(rows)
    kept, left_out = usable(rows)
    tuned = {tuple(each[name] for name in DRAFTER): each for each in (tune(kept)["drafters"] if kept else [])}
    with matplotlib.rc_context(sweep_figures.SMALL):
        targets = [_target(f"sweep{place}", model, own, grouped(_of(kept, model), ["method"]), tuned)
                   for place, ((model,), own) in enumerate(grouped(rows, ["model"]).items())]
    verdicts = [point.speedup < 1 for own in grouped(kept, (*DRAFTER, *CLASS)).values()
                for point in points(own).values()]
    return {"targets": targets, "left_out": dict(left_out), "rows": len(rows), "drafters": len(tuned),
            "notes": [*single_prompts(rows), *([] if kept else [NO_BASELINE])],
            "points": len(verdicts), "losing": sum(verdicts), "open": len(tuned) <= OPEN}


def require_names(rows: Sequence[Row]) -> None:
    """Raises UserError for a row that says neither what was served nor on which data."""
    for number, row in enumerate(rows):
        if lacking := [name for name in (*DRAFTER, "dataset") if not isinstance(row.get(name), str)]:
            raise UserError(f"row {number} lacks {', '.join(lacking)}, expected the names of what was served "
                            "and measured; measure it again, or take the row out")


def measured(rows: Iterable[Row]) -> list[Row]:
    """Those of an evaluation that a server was timed for, with whole drafts; [] where no class has two K, so
    that there is nothing to sweep over."""
    served = [row for row in rows if row.get("engine") != "in_process" and "confidence" not in row
              and row.get("speedup") is not None]
    several = any(len(points(own)) > 1 for own in grouped(usable(served)[0], (*DRAFTER, *CLASS)).values())
    return served if several else []


def load_of(temperature: float | None, users: int | None) -> str:
    """'4 users, T=0.7', of what is known; '' where nothing is."""
    parts = [figures.users({"users": users})] if users else []
    return ", ".join([*parts, *([f"T={temperature:g}"] if temperature is not None else [])])


def class_of(row: Mapping[str, Any]) -> str:
    """'gsm8k, 4 users, T=0'."""
    load = load_of(row.get("temperature"), row.get("users"))
    return f"{row['dataset']}, {load}" if load else row["dataset"]


def _two_lines(name: str) -> str:
    return name.replace(", ", "\n", 1)


def _of(rows: Iterable[Row], model: str) -> list[Row]:
    return [row for row in rows if row["model"] == model]


def _target(name: str, model: str, rows: list[Row], kept: dict[tuple, list[Row]],
            tuned: dict[tuple, Row]) -> dict[str, Any]:
    """One target: what each drafter reaches in each class, then the drafters one by one. `kept` are the rows
    with a speed-up, by method."""
    methods = [method for method, in kept]
    by_class = grouped([row for own in kept.values() for row in own], CLASS)
    comparison = [{"name": class_of(own[0]), "plain": _plain(own).tok_s,
                   "cells": [_fastest(found) if (found := by_method.get((method,))) else None
                             for method in methods]}
                  for own in by_class.values() for by_method in [grouped(own, ["method"])]]
    top = [max((cell["speedup"] for cell in line["cells"] if cell), default=None) for line in comparison]
    for line, most in zip(comparison, top, strict=True):
        for cell in filter(None, line["cells"]):
            cell["best"] = cell["speedup"] == most and not cell["loses"] and len(methods) > 1
    throughput = [(class_of(own[0]), _throughput(f"{name}speed{place}", model, own, methods))
                  for place, own in enumerate(by_class.values())]
    return {"model": model, "methods": methods, "comparison": comparison,
            "bars": _bars(name, model, comparison, methods) if comparison else [],
            "throughput": throughput, "latency": _latencies(name, model, by_class, methods),
            "positions": _by_method(name, model, rows),
            "drafters": [_drafter(f"{name}drafter{place}", own, kept.get((method,), []),
                                  tuned.get((model, method)))
                         for place, ((method,), own) in enumerate(grouped(rows, ["method"]).items())]}


def _bars(name: str, model: str, comparison: Sequence[dict[str, Any]],
          methods: Sequence[str]) -> list[tuple[str, Drawing]]:
    """Speed-up and throughput of the fastest K of each method, beside plain decoding."""
    cells = {_two_lines(line["name"]): {method: cell for method, cell in
                                        zip(methods, line["cells"], strict=True) if cell}
             for line in comparison}
    plain = dict(zip(cells, (line["plain"] for line in comparison), strict=True))
    speedups, speeds = ({label: {method: cell[field] for method, cell in own.items()}
                         for label, own in cells.items()} for field in ("speedup", "tok_s"))
    return [("Best speed-up", sweep_figures.bars(f"{name}bars", f"{model}: best speed-up by method", speedups,
                                                 methods)),
            ("Throughput at that K", sweep_figures.bars(f"{name}speeds", f"{model}: throughput by method",
                                                        speeds, methods, plain))]


def _by_method(name: str, model: str, rows: Sequence[Row]) -> Drawing | None:
    """Acceptance by position of the methods beside each other: of each the longest K, served if it was, with
    the fewest users. None of a single method."""
    counted = [row for row in rows if row.get(K) and row.get("per_position_acceptance")
               and row.get("mean_accepted_length") and "confidence" not in row]
    if len({row["method"] for row in counted}) < 2:
        return None
    several = len({row.get("temperature") for row in counted}) > 1
    named: dict[str, Row] = {}
    for (_, temperature), own in grouped(counted, ("dataset", "temperature")).items():
        for same in grouped(own, ["method"]).values():
            row = min(same, key=lambda each: (each.get("engine") == "in_process", -each[K],
                                              each.get("users") or 1))
            load = load_of(temperature, None) if several else ""
            named[", ".join(filter(None, (row["dataset"], load, row["method"], f"K={row[K]}")))] = row
    return sweep_figures.acceptance(f"{name}methods", f"{model}: acceptance by position", [*named.values()],
                                    [*named])


def _fastest(rows: Sequence[Row]) -> dict[str, Any]:
    """The best K of one class and method, and its throughput."""
    best = _best(points(rows))
    return {**best, "tok_s": _speed([row for row in rows if row[K] == best["k"]], "tok_s").tok_s}


def _best(found: Mapping[int, Any]) -> dict[str, Any]:
    point = max(found.values(), key=lambda each: each.speedup)
    return {"k": point.k, "speedup": point.speedup, "loses": point.speedup < 1,
            "losing": [each.k for each in found.values() if each.speedup < 1]}


def _throughput(name: str, model: str, rows: list[Row], methods: Sequence[str]) -> Drawing:
    by_method = grouped(rows, ["method"])
    lines = {method: [_speed(same, "tok_s") for _, same in
                      sorted(grouped(by_method.get((method,), []), [K]).items())] for method in methods}
    return sweep_figures.throughput(name, f"{model}, {class_of(rows[0])}: throughput", lines, _plain(rows))


def _speed(rows: Sequence[Row], field: str) -> Speed:
    """The mean of rows that are repeats, and the least and most of all that was timed for them."""
    values = [row[field] for row in rows]
    timed = [each for row in rows for each in row.get(f"{field}_repeats") or ()]
    return Speed(rows[0][K], sum(values) / len(values), min(values + timed), max(values + timed))


def _plain(rows: Sequence[Row]) -> Speed:
    return _speed(rows, "baseline_tok_s")


def _latencies(name: str, model: str, by_class: dict[tuple, list[Row]],
               methods: Sequence[str]) -> list[tuple[str, Drawing]]:
    """A figure for each data set and temperature that was measured with several numbers of users, where the
    rows say what users wait: plain decoding, and each method at the K that was fastest for that number."""
    found = []
    timed = [row for own in by_class.values() for row in own
             if row.get("users") and row.get("ms_per_token") and row.get("baseline_ms_per_token")]
    for place, ((dataset, temperature), own) in enumerate(grouped(timed, CLASS[:2]).items()):
        plain: dict[int, tuple[float, float]] = {}
        lines: dict[str, dict[int, tuple[float, float]]] = {method: {} for method in methods}
        for (users,), same in sorted(grouped(own, ["users"]).items()):
            plain[users] = same[0]["baseline_ms_per_token"], same[0]["baseline_tok_s"]
            for (method,), each in grouped(same, ["method"]).items():
                fastest = max(each, key=lambda row: row["tok_s"])
                lines[method][users] = fastest["ms_per_token"], fastest["tok_s"]
        if len(plain) > 1:
            title = class_of({"dataset": dataset, "temperature": temperature})
            drawn = sweep_figures.latency(f"{name}wait{place}", f"{model}, {title}: latency", plain, lines)
            found.append((f"{title}: {', '.join(map(str, plain))} users", drawn))
    return found


def _drafter(name: str, rows: list[Row], kept: list[Row], tuned: Row | None) -> dict[str, Any]:
    """One drafter: figures, the tuner's classes, and all rows; without a speed-up the rows alone."""
    title = f"{rows[0]['method']} for {rows[0]['model']}"
    shown = {"method": rows[0]["method"], "rows": [_line(row) for row in rows], "tuned": None}
    if not tuned:
        return shown
    by_class = {tuple(own[0].get(field) for field in CLASS): points(own)
                for own in grouped(kept, CLASS).values()}
    classes = {tuple(own[field] for field in CLASS): own for own in tuned["classes"]}
    labels = {key: _two_lines(class_of(own)) for key, own in classes.items()}
    return {**shown, "tuned": tuned, "recommendation": recommendation(tuned),
            "classes": [_tuned(own, by_class[key]) for key, own in classes.items()],
            "doubts": tuned["doubts"] + [f"{class_of(own)}: {doubt['text']}." for own in tuned["classes"]
                                         for doubt in own["doubts"]],
            "speedups": sweep_figures.speedups(
                f"{name}speedups", f"{title}: speed-up",
                {labels[key]: {k: point.speedup for k, point in own.items()}
                 for key, own in by_class.items()},
                {labels[key]: own["k"] for key, own in classes.items()}),
            "costs": _costs(name, title, by_class, classes), **_acceptance(name, title, kept)}


def _costs(name: str, title: str, by_class: Mapping[tuple, Mapping[int, Any]],
           classes: Mapping[tuple, Row]) -> list[tuple[str, Drawing]]:
    """A panel for each load, a line for each data set."""
    loads: dict[str, dict[str, Fit]] = {}
    for (dataset, temperature, users), own in by_class.items():
        tuned = classes[dataset, temperature, users]
        loads.setdefault(load_of(temperature, users) or UNNAMED, {})[dataset] = Fit(
            list(own.values()), tuned["round_cost"]["intercept"], tuned["round_cost"]["slope"], tuned["k"])
    return [(load, sweep_figures.costs(f"{name}cost{place}", f"{title}, {load}: cost of a round", fits))
            for place, (load, fits) in enumerate(loads.items())]


def _acceptance(name: str, title: str, kept: list[Row]) -> dict[str, Any]:
    """Accepted length and acceptance by position. Neither depends on the users: of those that differ in that
    alone the fewest are shown."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    named: dict[str, dict[str, Any]] = {}
    several = len({row.get("temperature") for row in kept}) > 1
    for (dataset, temperature), own in grouped(kept, ("dataset", "temperature")).items():
        load = load_of(temperature, None)
        for (k,), same in sorted(grouped(own, [K]).items()):
            fewest = min(row.get("users") or 1 for row in same)
            point = points([row for row in same if (row.get("users") or 1) == fewest])[k]
            lines.setdefault(load, {}).setdefault(dataset, {})[k] = point.accepted_length
            named[", ".join(filter(None, (dataset, load if several else "", f"K={k}")))] = {
                "per_position_acceptance": point.rates, "mean_accepted_length": point.accepted_length}
    return {"lengths": [(load or UNNAMED, sweep_figures.lengths(
                f"{name}length{place}", f"{title}, {load or UNNAMED}: accepted length", own))
                        for place, (load, own) in enumerate(lines.items())],
            "positions": sweep_figures.acceptance(f"{name}positions", f"{title}: acceptance by position",
                                                  [*named.values()], [*named])}


def _tuned(own: Row, found: Mapping[int, Any]) -> dict[str, Any]:
    """A class of the tuner's, with what it expects of its own K and what was best of the measured ones."""
    return {**own, "name": class_of(own), "picked": own["k"] in found, "best": _best(found)}


def _line(row: Row) -> dict[str, Any]:
    """A row of the table of all, with None for what it does not say."""
    shown = (K, "baseline_tok_s", "tok_s", "speedup", "mean_accepted_length", "acceptance_rate", "lossless",
             "attention_backend")
    both = row.get("tok_s") and row.get("baseline_tok_s")
    timed = row.get("tok_s_repeats") or ()
    return {"name": class_of(row), **{field: row.get(field) for field in shown},
            "rates": " ".join(f"{rate:.2f}" for rate in row.get("per_position_acceptance") or ()),
            "repeats": f"{min(timed):,.1f} to {max(timed):,.1f}" if timed else "",
            "loses": bool(both) and row["tok_s"] < row["baseline_tok_s"]}
