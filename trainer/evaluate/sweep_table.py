"""What a sweep measured, as tables for a terminal and in Markdown: a line a class of traffic, a column a K.

Where a drafter loses against plain decoding, the line and the sentences below say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.evaluate.doubts import NEAR_ONE, single_prompts
from trainer.evaluate.figures import users
from trainer.evaluate.rows import FEW_TOKENS
from trainer.evaluate.traffic import CLASS, DRAFTER, Row, grouped

NOTHING = "–"
MOSTLY = 0.9  # share of steps with a draft from which a method drafts nearly always
LOST = "do not speculate: plain decoding is faster"


def print_sweep(rows: list[Row]) -> None:
    """One table a method, then what is to be said of it."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    for own in grouped(rows, DRAFTER).values():
        console.print(_table(own))
        for sentence in sentences(own):
            console.print(sentence, soft_wrap=True)


def markdown(rows: list[Row]) -> str:
    """The same, and every row with its spread."""
    parts = []
    for own in grouped(rows, DRAFTER).values():
        lengths = _lengths(own)
        parts += [f"## {_title(own)}", "Speed-up over plain decoding (output tokens/s, medians).",
                  _grid(["data", "load", "plain tok/s", *(f"K={k}" for k in lengths), "best"],
                        [[*_named(same), *_speedups(same, lengths), verdict(same)]
                         for same in _classes(own)]),
                  _grid(["data", "load", "K", "plain tok/s", "tok/s", "speed-up", "accepted length",
                         "acceptance by position", "text"], [_detail(row) for row in own]),
                  "\n".join(f"- {sentence}" for sentence in sentences(own))]
    return "\n\n".join(["# Sweep", *parts]) + "\n"


def verdict(same: list[Row]) -> str:
    """The best K of one class of traffic, or that there is none."""
    told = [row for row in same if row["speedup"] is not None]
    if not told:
        return "no speed-up to tell"
    best = max(told, key=lambda row: row["speedup"])
    return f"K={best['num_speculative_tokens']}, {best['speedup']:.2f}x" if best["speedup"] > 1 else LOST


def sentences(own: list[Row]) -> Iterator[str]:
    """What is to be known of the rows of one method."""
    classes = list(_classes(own))
    lost = [_class(same[0]) for same in classes if verdict(same) == LOST]
    if lost:
        yield (f"Speculation loses in {len(lost)} of {len(classes)} classes of traffic, with every K: "
               f"{_some(lost)}.")
    differing = [f"{_class(row)}, K={row['num_speculative_tokens']}: {row['differing']} of "
                 f"{row['requests'] * row['repeats']} answers" for row in own if row["differing"]]
    if differing:
        yield (f"Greedy texts differ with the drafter ({_some(differing)}): in float32 the verification or "
               "the attention for several queries is wrong; below, batch shapes alone can do that.")
    silent = [row for row in own if row["speedup"] is None]
    if any(row["interpreted"] for row in silent):
        yield "vLLM's CPU build interprets the kernels of this method, so that no speed is told."
    elif few := [row for row in silent if row["output_tokens"] < FEW_TOKENS]:
        yield (f"{len(few)} rows have less than {FEW_TOKENS} timed tokens, so that no speed-up is told; "
               "raise sweep.prompts, sweep.max_new_tokens or sweep.repeats.")
    elif near := [row for row in silent if row["mean_accepted_length"] < NEAR_ONE]:
        yield (f"{len(near)} rows accept next to nothing (accepted length below {NEAR_ONE}), so that a "
               "speed-up would be chance.")
    if seldom := [share for row in own if (share := _drafting(row)) < MOSTLY]:
        yield (f"Of its steps only {min(seldom):.0%} to {max(seldom):.0%} had a draft; accepted lengths and "
               "acceptance are those of these steps.")
    yield from single_prompts(own)
    if any(row["repeats"] == 1 for row in own):
        yield "Every cell was measured once, so that no spread can be told; raise sweep.repeats."
    backends, versions = (" and ".join(sorted({row[name] for row in own}))
                          for name in ("attention_backend", "vllm"))
    yield f"Attention backend: {backends}; vLLM {versions}."


def _drafting(row: Row) -> float:
    """The share of the steps, after those that read a prompt, that had a draft to verify: a method that looks
    up what came before does not always find something."""
    drafted = row["drafts"] * row["mean_accepted_length"]  # tokens
    without = row["output_tokens"] - row["requests"] * row["repeats"] - drafted
    return row["drafts"] / (row["drafts"] + max(0.0, without)) if row["drafts"] else 0.0


def _table(own: list[Row]) -> Table:
    lengths = _lengths(own)
    table = Table(title=_title(own), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for title in ("data", "load", "plain tok/s"):
        table.add_column(title, no_wrap=True)
    for k in lengths:
        table.add_column(f"K={k}", justify="right", no_wrap=True)
    table.add_column("accepted length", no_wrap=True)
    table.add_column("best")
    for same in _classes(own):
        best, losing = verdict(same), verdict(same) == LOST
        cells = [Text(shown, "bold green" if best.startswith(f"K={k},") else
                      "red" if shown < "1" else "") for k, shown in zip(lengths, _speedups(same, lengths),
                                                                       strict=True)]
        accepted = " ".join(f"{row['mean_accepted_length']:.2f}" for row in same)
        table.add_row(*_named(same), *cells, accepted, Text(best, "red" if losing else ""))
    return table


def _title(own: list[Row]) -> str:
    return f"{own[0]['method']} for {own[0]['model']}"


def _classes(own: list[Row]) -> Iterator[list[Row]]:
    """The rows of each class of traffic, by K."""
    for same in grouped(own, CLASS).values():
        yield sorted(same, key=lambda row: row["num_speculative_tokens"])


def _lengths(own: list[Row]) -> list[int]:
    return sorted({row["num_speculative_tokens"] for row in own})


def _class(row: Row) -> str:
    return f"{row['dataset']} at {_load(row)}"


def _load(row: Row) -> str:
    return users(row) + (f", T={row['temperature']:g}" if row["temperature"] else "")


def _named(same: list[Row]) -> list[str]:
    """What a line of one class begins with; plain decoding was measured beside every K."""
    speeds = [row["baseline_tok_s"] for row in same]
    middle = sum(speeds) / len(speeds)
    spread = f" ({min(speeds):.1f} to {max(speeds):.1f})" if len({*speeds}) > 1 else ""
    return [same[0]["dataset"], _load(same[0]), f"{middle:.1f}{spread}"]


def _speedups(same: list[Row], lengths: list[int]) -> list[str]:
    found = {row["num_speculative_tokens"]: row["speedup"] for row in same}
    return [NOTHING if found.get(k) is None else f"{found[k]:.2f}" for k in lengths]


def _detail(row: Row) -> list[str]:
    text = {None: NOTHING, True: "identical", False: f"{row['differing']} differ"}[row["lossless"]]
    return [row["dataset"], _load(row), str(row["num_speculative_tokens"]),
            _spread(row["baseline_tok_s"], row["baseline_tok_s_repeats"]),
            _spread(row["tok_s"], row["tok_s_repeats"]),
            NOTHING if row["speedup"] is None else f"{row['speedup']:.2f}",
            f"{row['mean_accepted_length']:.3f}",
            " ".join(f"{rate:.2f}" for rate in row["per_position_acceptance"]), text]


def _spread(middle: float | None, repeats: list[float]) -> str:
    """'17.3 (16.9 to 17.8)': the median, least and most."""
    if middle is None:
        return NOTHING
    return f"{middle:.1f}" + (f" ({min(repeats):.1f} to {max(repeats):.1f})" if len(repeats) > 1 else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _grid(titles: list[str], lines: list[list[str]]) -> str:
    shown = [titles, ["---"] * len(titles), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in shown)
