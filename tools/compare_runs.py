"""What made the difference: the finished trainings below a folder, the settings in which they differ, and
what each of them reached on held-out samples.

    python tools/compare_runs.py [runs ...] [--only KEY=VALUE ...] [--out FOLDER]
    python tools/compare_runs.py --bits A B

Trainings that differ in nothing but their seeds are a group, compared with the best group: mean, spread
(standard deviation between the seeds) and difference with its standard error. The settings are those of the
training and of the stages that it stands on; of stored hidden states it counts what their manifest says. A
training that was evaluated is also compared by the accepted lengths that were decoded: those are always
judged on the target's own states, while held-out loss and estimate are computed from the stored ones.
Trainings for different targets are refused.

Writes comparison.json, and comparison.html that loads nothing, into --out or else the first folder. With
`--bits` two train folders are compared bit for bit: weights, and loss and gradient norm of every step that
was logged.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finished_runs import ENGINES, RESULTS, Run, runs_below  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from trainer.errors import UserError  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

COLUMNS = 6  # settings that are shown beside each other
OF_TARGET = re.compile(r"(?:.*\.)?target\.(name|source\..*)")  # what says which target it is, in any stage


def is_seed(key: str) -> bool:
    """Whether a key is a seed of the run; that of a random target says what the target is."""
    *nodes, last = key.split(".")
    return last == "seed" and "target" not in nodes


def require_one_target(runs: Sequence[Run]) -> None:
    """Raises UserError where runs are for different targets, whose figures say nothing of each other. One of
    which nothing says its target is let through."""
    known = all(run.target for run in runs)
    found: dict[str, list[Run]] = {}
    for run in runs:
        said = {match[1]: value for key, value in run.settings.items() if (match := OF_TARGET.fullmatch(key))}
        if known or said:
            found.setdefault(run.target if known else json.dumps(said, sort_keys=True), []).append(run)
    if len(found) > 1:
        names = [(inside[0].settings.get("target.name", "without a name").strip('"'),
                  ", ".join(run.name[:8] for run in inside[:4])) for inside in found.values()]
        named = "; ".join(f"{name}: {trainings}" for name, trainings in sorted(names))
        raise UserError(f"the trainings are for {len(found)} different targets ({named}), and are not "
                        "compared, since neither losses nor accepted lengths of one say anything of another; "
                        "choose one with --only target.name=NAME, or give a folder of its trainings alone")


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which runs differ; of several that differ in the same way, the shortest."""
    keys = {key for run in runs for key in run.settings}
    ways: dict[tuple[str | None, ...], str] = {}
    for key in sorted(keys, key=lambda each: (len(each), each)):
        way = tuple(run.settings.get(key) for run in runs)
        if len(set(way)) > 1:
            ways.setdefault((*way, str(is_seed(key))), key)
    return sorted(ways.values())


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """What comparison.json holds: groups in the order of their best run, differences from the first one."""
    keys = differing(runs)
    seeds, plain = [key for key in keys if is_seed(key)], [key for key in keys if not is_seed(key)]
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        members.setdefault(tuple(run.settings.get(key, "-") for key in plain), []).append(run)
    groups = [_group(dict(zip(plain, values, strict=True)), inside, seeds)
              for values, inside in members.items()]
    for each in groups:
        each["title"] = _title(each["settings"], groups[0]["settings"])
    return {"settings": plain, "seeds": seeds, "groups": groups,
            "differences": [_difference(each, groups[0]) for each in groups[1:]]}


def _group(settings: dict[str, str], runs: list[Run], seeds: list[str]) -> dict[str, Any]:
    listed = sorted(({"run": run.name, "seed": _seed(run, seeds), "steps": run.record["steps"],
                      "seconds": run.record["train_seconds"], "figures": run.figures} for run in runs),
                    key=lambda each: each["seed"])
    figures = {}
    for name in dict.fromkeys(name for each in listed for name in each["figures"]):
        values = [each["figures"][name] for each in listed if name in each["figures"]]
        figures[name] = {"mean": statistics.fmean(values), "runs": len(values),
                         "spread": statistics.stdev(values) if len(values) > 1 else None}
    return {"settings": settings, "runs": listed, "figures": figures}


def _title(settings: dict[str, str], first: dict[str, str]) -> str:
    """A group's settings; where they are many, those in which it differs from the first group."""
    if len(settings) > COLUMNS:
        if settings == first:
            return "the best group"
        settings = {key: value for key, value in settings.items() if value != first[key]}
    words = [f"{key.removesuffix('._target_').rpartition('.')[2]} {value}" for key, value in settings.items()]
    return ", ".join(words).replace('"', "") or "all runs"


def _seed(run: Run, seeds: list[str]) -> str:
    """The seed of a run; where its seeds differ among themselves, each of them."""
    own = {key: run.settings.get(key, "-") for key in seeds or ["seed"]}
    return next(iter(own.values())) if len(set(own.values())) == 1 else \
        ", ".join(f"{key} {value}" for key, value in own.items())


def _difference(group: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Group minus reference. The standard error is that of two independent means; where both have the same
    seeds, each once, the differences seed by seed and the error of their mean are given as well."""
    figures = {}
    for name in [name for name in group["figures"] if name in reference["figures"]]:
        ours, theirs = group["figures"][name], reference["figures"][name]
        single = ours["spread"] is None or theirs["spread"] is None
        pairs = _by_seed(group, reference, name)
        figures[name] = {
            "difference": ours["mean"] - theirs["mean"],
            "standard_error": None if single else sum(
                each["spread"] ** 2 / each["runs"] for each in (ours, theirs)) ** 0.5,
            "by_seed": pairs,
            "paired_standard_error": statistics.stdev(pairs.values()) / len(pairs) ** 0.5
            if len(pairs) > 1 else None}
    return {"group": group["title"], "reference": reference["title"], "figures": figures}


def _by_seed(group: dict[str, Any], reference: dict[str, Any], name: str) -> dict[str, float]:
    ours, theirs = ({run["seed"]: run["figures"][name] for run in each["runs"] if name in run["figures"]}
                    for each in (group, reference))
    once = all(len(own) == each["figures"][name]["runs"]
               for own, each in ((ours, group), (theirs, reference)))
    same = once and ours.keys() == theirs.keys()
    return {seed: ours[seed] - theirs[seed] for seed in ours} if same else {}


def signed(value: float | None, error: float | None) -> str:
    return f"{value:+.4f}" + (f" ± {error:.4f}" if error is not None else "")


def telling(figures: dict[str, Any]) -> dict[str, Any]:
    """Without decodings in process that a server did as well, which a gate holds together; files have all."""
    here, served = ENGINES.values()
    return {name: figure for name, figure in figures.items()
            if not name.endswith(here) or name.removesuffix(here) + served not in figures}


def show(runs: Sequence[Run], found: dict[str, Any]) -> None:
    console = Console(width=200, highlight=False)
    keys = [*found["settings"], *found["seeds"]]
    wide = len(keys) > COLUMNS
    table = Table("run", *(["other than in the best run"] if wide else keys), "steps", "seconds", *RESULTS)
    for run in runs:
        own = {key: run.settings.get(key, "-") for key in keys}
        cells = ["\n".join(f"{key} {value}" for key, value in own.items()
                           if value != runs[0].settings.get(key, "-"))] if wide else own.values()
        table.add_row(run.name[:8], *map(escape, cells), str(run.record["steps"]),
                      f"{run.record['train_seconds']:.0f}",
                      *(f"{run.figures[name]:.3f}" if name in run.figures else "-" for name in RESULTS))
    console.print(table)
    if len(found["groups"]) == len(runs):
        return
    table = Table("group", "figure", "mean", "spread", "by seed", title="groups: all but the seeds is equal",
                  title_justify="left")
    for group in found["groups"]:
        for number, (name, figure) in enumerate(telling(group["figures"]).items()):
            each = ", ".join(f"{run['seed']}: {run['figures'][name]:.4f}" for run in group["runs"]
                             if name in run["figures"])
            table.add_row("" if number else escape(group["title"]), name, f"{figure['mean']:.4f}",
                          "-" if figure["spread"] is None else f"{figure['spread']:.4f}", each)
        table.add_section()
    console.print(table)
    for each in found["differences"]:
        console.print(f"{each['group']} against {each['reference']}", markup=False)
        for name, figure in telling(each["figures"]).items():
            paired = f"; seed by seed {signed(figure['difference'], figure['paired_standard_error'])}" \
                if figure["by_seed"] else ""
            console.print(f"  {name}: {signed(figure['difference'], figure['standard_error'])}{paired}")


def table(roots: Sequence[Path], only: Sequence[str], out: Path) -> int:
    from compare_page import page

    wanted = [tuple(each.split("=", 1)) for each in only]
    runs = [run for run in runs_below(roots)
            if all(run.settings.get(key, "-").strip('"') == value for key, value in wanted)]
    if not runs:
        below = ", ".join(f"{root}/train" for root in roots)
        print(f"no finished training below {below}" + (f" with {' '.join(only)}" if only else ""),
              file=sys.stderr)
        return 2
    require_one_target(runs)
    found = compare(runs)
    show(runs, found)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "comparison.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (out / "comparison.html").write_text(page(found), encoding="utf-8")
    except OSError as error:
        print(f"{out} cannot be written ({error.strerror}): set --out to another folder", file=sys.stderr)
        return 2
    print(out / "comparison.html")
    return 0


def bits(one: Path, two: Path) -> int:
    """0 when both runs have the same bits, 1 with the first difference when not."""
    import torch
    from safetensors.torch import load_file

    for folder in (one, two):
        if not (folder / "weights.safetensors").is_file() or not (folder / "log.jsonl").is_file():
            print(f"{folder} is no folder of a finished training: it lacks weights.safetensors or log.jsonl",
                  file=sys.stderr)
            return 2
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, two))
    for name in sorted(set(first) | set(second)):
        if name not in first or name not in second or not torch.equal(first[name], second[name]):
            print(f"{name} differs")
            return 1
    logs = [{line["step"]: (line.get("loss"), line.get("grad_norm"))
             for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())}
            for folder in (one, two)]
    shared = sorted(set(logs[0]) & set(logs[1]))
    for step in shared:
        if logs[0][step] != logs[1][step]:
            print(f"step {step}: loss and gradient norm {logs[0][step]} and {logs[1][step]}")
            return 1
    print(f"equal: {len(first)} tensors, {len(shared)} logged steps")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")])
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY=VALUE",
                        help="leave out trainings with other settings; keys as the table shows them")
    parser.add_argument("--out", type=Path, help="where comparison.json and comparison.html go")
    parser.add_argument("--bits", nargs=2, type=Path, metavar=("A", "B"))
    options = parser.parse_args()
    return bits(*options.bits) if options.bits else table(options.runs, options.only,
                                                          options.out or options.runs[0])


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
