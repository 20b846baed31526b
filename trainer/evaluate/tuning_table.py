"""What tuning found, as tables for a terminal or a log."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.evaluate.figures import users


def print_tuning(tuning: dict[str, Any]) -> None:
    """One table a drafter, one line a class of traffic; then what to serve with, and what to doubt. Names are
    the user's own, so nothing in them is markup."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    for drafter in tuning["drafters"]:
        console.print(_table(drafter))
        console.print(recommendation(drafter), soft_wrap=True)
        for doubt in [*_of_classes(drafter["classes"]), *drafter["doubts"]]:
            console.print(Text.assemble(("warning", "yellow"), f" {doubt}"), soft_wrap=True)
    for reason, count in tuning["left_out"].items():
        console.print(f"{count} rows with {reason} say nothing of speed and were left out", soft_wrap=True)


def recommendation(drafter: dict[str, Any]) -> str:
    """What to serve a drafter with, in a line."""
    name = f"{drafter['method']} for {drafter['model']}"
    if not drafter["speculate"]:
        return f"{name}: do not speculate; over this traffic no draft length is expected to save time"
    schedule = drafter["num_speculative_tokens_per_batch_size"] or []
    by_batch = ", ".join(f"{k or 'no draft'} at {first} to {last}" for first, last, k in schedule)
    unseen = all(drafter["default_k"] not in own["measured_k"] for own in drafter["classes"])
    return (f"{name}: K = {drafter['default_k']}{', which nobody has measured yet' if unseen else ''}; "
            f"{drafter['speedup']:.2f}x plain decoding is expected over all classes"
            + (f"; by batch size: {by_batch}" if len(schedule) > 1 else "")
            + (f"; batches beyond {schedule[-1][1]} were not measured" if schedule else ""))


def _table(drafter: dict[str, Any]) -> Table:
    """Speed-ups by K; those in brackets are expected, not measured. All K are in tuning.json."""
    shown = {k for own in drafter["classes"] for k in (*own["measured_k"], own["k"], own["measure_next"])}
    table = Table(title=f"{drafter['method']} for {drafter['model']}", box=box.SIMPLE_HEAD,
                  title_justify="left", title_style="bold")
    for title in ("data", "load", "round, plain steps", "best", "speed-up (90 %)"):
        table.add_column(title, no_wrap=True)
    for each in drafter["classes"][0]["expected"]:
        if each["k"] in shown - {0}:
            table.add_column(f"K={each['k']}", justify="right", no_wrap=True)
    for own in drafter["classes"]:
        load = users(own) + ("" if own["temperature"] is None else f", T={own['temperature']:g}")
        cost = own["round_cost"]
        next_k = "" if own["measure_next"] is None else f"; measure K={own['measure_next']}"
        verdict = f"K={own['k']}" if own["speculate"] else "do not speculate"
        table.add_row(str(own["dataset"]), load if own["users"] else load.removeprefix("1 user").lstrip(", "),
                      f"{cost['intercept']:.2f} + {cost['slope']:.3f} K", verdict + next_k,
                      f"{own['speedup']:.2f} ({own['low']:.2f} to {own['high']:.2f})",
                      *(_cell(each, own["k"]) for each in own["expected"][1:] if each["k"] in shown))
    return table


def _cell(each: dict[str, Any], best: int) -> Text:
    shown = f"{each['speedup']:.2f}"
    return Text(shown if each["measured"] else f"({shown})", "bold green" if each["k"] == best else "")


def _of_classes(classes: list[dict[str, Any]]) -> list[str]:
    """The doubts of classes, one sentence a kind, with the first class that it is about."""
    found: dict[str, list[str]] = {}
    for own in classes:
        for doubt in own["doubts"]:
            found.setdefault(doubt["kind"], []).append(f"{own['dataset']}, {users(own)}: {doubt['text']}")
    more = {kind: f" (and {len(same) - 1} more like it)" for kind, same in found.items() if len(same) > 1}
    return [f"{same[0]}{more.get(kind, '')}." for kind, same in found.items()]
