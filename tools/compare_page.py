"""A part of tools/compare_runs.py and no command: its page, one HTML file that loads nothing."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --soft: #6b7588; --line: #8884; --accent: #3461d8; }
@media (prefers-color-scheme: dark) { :root { --accent: #86a8ff; } }
body { font: 15px/1.55 system-ui, sans-serif; max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 4px; }
p { color: var(--soft); margin: 0 0 10px; max-width: 100ch; } div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); } td { max-width: 32ch; overflow-wrap: anywhere; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
svg { display: block; } circle { fill: var(--accent); fill-opacity: .55; } line { stroke: var(--line); }
line.mean { stroke: var(--accent); stroke-width: 2; }
"""
WIDTH, HEIGHT, EDGE = 260, 22, 8  # pixels


def page(found: dict[str, Any]) -> str:
    """`found` is the content of comparison.json."""
    groups = found["groups"]
    names = list(dict.fromkeys(name for group in groups for name in group["figures"]))
    differences = {each["group"]: each["figures"] for each in found["differences"]}
    parts = [_figure(name, [group for group in groups if name in group["figures"]], differences)
             for name in names]
    count = sum(len(group["runs"]) for group in groups)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>Comparison of {count} trainings</title><style>{STYLE}</style></head><body>'
            f"<h1>{count} trainings in {len(groups)} groups</h1><p>The runs of a group differ in nothing but "
            "their seeds. Spread is the standard deviation between them; a difference is that of the means "
            "from the first group, ± its standard error.</p>"
            f"{_settings(found)}{''.join(parts)}</body></html>\n")


def _settings(found: dict[str, Any]) -> str:
    head = ["group", "runs", *found["settings"]]
    rows = [[group["title"], ", ".join(f"{run['run'][:8]} (seed {run['seed']})" for run in group["runs"]),
             *group["settings"].values()] for group in found["groups"]]
    return f"<h2>Settings that differ</h2>{_table(head, [[escape(cell) for cell in row] for row in rows])}"


def _figure(name: str, groups: list[dict[str, Any]], differences: dict[str, Any]) -> str:
    every = [run["figures"][name] for group in groups for run in group["runs"] if name in run["figures"]]
    low, high = min(every), max(every)
    rows = []
    for group in groups:
        figure, change = group["figures"][name], differences.get(group["title"], {}).get(name)
        values = [run["figures"][name] for run in group["runs"] if name in run["figures"]]
        by_seed = ", ".join(f"{run['seed']}: {run['figures'][name]:.4f}" for run in group["runs"]
                            if name in run["figures"])
        rows.append([escape(group["title"]), f"{figure['mean']:.4f}",
                     "" if figure["spread"] is None else f"{figure['spread']:.4f}", escape(by_seed),
                     _dots(values, figure["mean"], low, high), *_change(change)])
    head = ["group", "mean", "spread", "by seed", f"{low:.4f} … {high:.4f}", "difference", "seed by seed"]
    return f"<h2>{escape(name)}</h2>{_table(head, rows)}"


def _change(change: dict[str, Any] | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    errors = (change["standard_error"], change["paired_standard_error"])
    plain, paired = (f"{change['difference']:+.4f}" + ("" if error is None else f" ± {error:.4f}")
                     for error in errors)
    return plain, paired if change["by_seed"] else ""


def _dots(values: list[float], mean: float, low: float, high: float) -> str:
    """One dot a run and a bar at the mean, on the scale that all groups share."""
    def place(value: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * ((value - low) / (high - low) if high > low else 0.5)

    middle = HEIGHT / 2
    dots = "".join(f'<circle cx="{place(value):.1f}" cy="{middle}" r="4"/>' for value in values)
    bar = f'<line class="mean" x1="{place(mean):.1f}" x2="{place(mean):.1f}" y1="2" y2="{HEIGHT - 2}"/>'
    return (f'<svg width="{WIDTH}" height="{HEIGHT}"><line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{middle}" '
            f'y2="{middle}"/>{dots}{bar}</svg>')


def _table(head: list[str], rows: list[list[str]]) -> str:
    """The cells of `rows` are HTML already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f'<td>{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<div><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
