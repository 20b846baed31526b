"""The figures of a sweep: small ones, as wide as a phone, in the manner of `figures`.

Lines differ by their marks as well as by their colours, and what a cell means is written into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.evaluate.figures import (
    IN_TABLE,
    MIDDLE,
    NEUTRAL,
    READABLE,
    SERIES,
    STYLE,
    as_table,
    canvas,
    cell,
    position_heatmap,
    svg,
)
from trainer.evaluate.tuning import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL = STYLE | {"font.size": READABLE, "axes.labelsize": READABLE}  # so that a unit of a drawing is a pixel
WIDE, TALL, LINE = 336, 200, 20  # pixels: a panel, without its legend, and a line of that
LETTER, CELL = 7.4, 40  # pixels: a letter's mean width, and a cell's
INCH = 72
MARKS = "osD^vPX*"
WIN, LOSS = "#2f5fe0", "#d9622b"
FAINT, STRONG = 0.06, 0.68  # of a cell's colour, so that the page's own ink reads on it
CERTAIN = 2.0  # the factor from plain decoding at which a colour is full


@dataclass(frozen=True)
class Speed:
    """Output tokens a second with drafts of `k` tokens, least and most of the repeats."""

    k: int
    tok_s: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """What rounds cost in one class of traffic: measured, and as intercept + slope * K; `pick` is the K that
    the tuner recommends, 0 for plain decoding."""

    points: Sequence[Point]
    intercept: float
    slope: float
    pick: int


def speedups(name: str, title: str, classes: Mapping[str, Mapping[int, float]],
             picks: Mapping[str, int]) -> str:
    """A line a class, a column a measured K; a cell that is slower than plain decoding says so, and so does
    the one that the tuner picks."""
    lengths = sorted({k for own in classes.values() for k in own})
    names = max(len(line) for label in classes for line in label.split("\n"))
    width = max(WIDE, LETTER * names + CELL * len(lengths) + 16)
    figure, (axes,) = canvas((CELL * len(classes) + 2 * LINE) / INCH, width=width / INCH)
    for line, (label, own) in enumerate(classes.items()):
        for column, k in enumerate(lengths):
            if k not in own:
                continue
            strength = min(1.0, abs(math.log(own[k])) / math.log(CERTAIN))
            colour = LOSS if own[k] < 1 else WIN
            axes.add_patch(cell(column, line, FAINT + (STRONG - FAINT) * strength, colour))
            below = [word for word, holds in (("loses", own[k] < 1), ("pick", k == picks[label])) if holds]
            axes.text(column + 0.5, line + 0.5, "\n".join([f"{own[k]:.2f}", *below]), linespacing=1.05,
                      weight="bold" if "pick" in below else "normal", **MIDDLE)
    axes.set(xlim=(0, len(lengths)), ylim=(len(classes), 0))
    axes.set_xticks([column + 0.5 for column in range(len(lengths))], [f"K={k}" for k in lengths])
    axes.set_yticks([line + 0.5 for line in range(len(classes))], list(classes))
    as_table(axes)
    return svg(figure, name, title, f"Speed-up by class of traffic and K. {IN_TABLE}")


def acceptance(name: str, title: str, lines: Sequence[dict], names: Sequence[str]) -> str:
    """The share of drafts accepted as far as each position; a line a data set and K."""
    longest = max(len(row["per_position_acceptance"]) for row in lines)
    width = max(WIDE, LETTER * max(map(len, names)) + 0.85 * CELL * (longest + 1.1) + 16)
    return svg(position_heatmap(lines, names, width / INCH), name, title,
               f"A line a data set and K, a column a position, last the accepted length. {IN_TABLE}")


def throughput(name: str, title: str, methods: Mapping[str, Sequence[Speed]],
               plain: Speed | None) -> str:
    """Tokens a second over K, a line a method, bars from the least to the most of repeats; plain decoding is
    the dashed line, and what lies below it loses."""
    figure, axes = _panel()
    speeds = [speed.tok_s for own in methods.values() for speed in own]
    for number, (method, own) in enumerate(methods.items()):
        off = [[speed.tok_s - speed.low for speed in own], [speed.high - speed.tok_s for speed in own]]
        _line(axes, number, [speed.k for speed in own], [speed.tok_s for speed in own], method,
              off if any(map(any, off)) else None)
    top = max(speeds)
    if plain:
        _dashed(axes, plain.tok_s, "plain decoding")
        axes.axhspan(plain.low, plain.high, color=NEUTRAL, alpha=0.12, linewidth=0)
        top = max(top, plain.high)
        if min(speeds) < plain.tok_s:
            axes.axhspan(0, plain.tok_s, color=LOSS, alpha=0.08, linewidth=0)
            axes.text(0.98, 0.04, "below: speculation loses", transform=axes.transAxes, ha="right")
    axes.set(ylabel="tokens/s", ylim=(0, 1.08 * top))
    return _finished(figure, axes, name, title, "Throughput over K, with plain decoding as a line.")


def lengths(name: str, title: str, datasets: Mapping[str, Mapping[int, float]]) -> str:
    """The accepted length over K, a line a data set; the dashed line is plain decoding."""
    figure, axes = _panel()
    for number, (dataset, own) in enumerate(datasets.items()):
        _line(axes, number, list(own), list(own.values()), dataset)
    _dashed(axes, 1.0, "plain decoding")
    axes.set(ylabel="tokens a step", ylim=(0.8, None))
    return _finished(figure, axes, name, title, "Accepted length over K.")


def costs(name: str, title: str, classes: Mapping[str, Fit]) -> str:
    """What a round costs over K in plain steps: measured marks, the fitted line, a ring at the tuner's K."""
    figure, axes = _panel()
    longest = max(max(fit.points[-1].k, fit.pick) for fit in classes.values())
    for number, (label, fit) in enumerate(classes.items()):
        colour = SERIES[number % len(SERIES)]
        axes.plot([0, longest], [fit.intercept, fit.intercept + fit.slope * longest], color=colour,
                  linewidth=1.2)
        axes.plot([point.k for point in fit.points], [point.cost for point in fit.points], color=colour,
                  linestyle="", marker=MARKS[number % len(MARKS)], markersize=5.5,
                  label=f"{label}: {fit.intercept:.2f} + {fit.slope:.3f} K")
        if fit.pick:
            at = next((point.cost for point in fit.points if point.k == fit.pick),
                      fit.intercept + fit.slope * fit.pick)
            axes.plot([fit.pick], [at], marker="o", markersize=13, markerfacecolor="none", color=colour)
    axes.set(ylabel="plain steps a round", ylim=(0, None), xlim=(0, None))
    return _finished(figure, axes, name, title, "Cost of a round over K with its fitted line.")


def latency(name: str, title: str, methods: Mapping[str, Mapping[int, tuple[float, float]]]) -> str:
    """Throughput over what a user waits for a token (milliseconds, tokens a second, by number of users), a
    line a method."""
    figure, axes = _panel()
    for number, (method, own) in enumerate(methods.items()):
        _line(axes, number, *zip(*own.values(), strict=True), method)
        for users, place in own.items():
            axes.annotate(str(users), place, (0, 6), textcoords="offset points", ha="center")
    axes.set(ylabel="tokens/s, all users", xlabel="ms a token of one user", ylim=(0, None), xlim=(0, None))
    axes.margins(x=0.06, y=0.15)
    return _finished(figure, axes, name, title, "Throughput over latency; marks are numbers of users.")


def _panel() -> tuple[Figure, Axes]:
    figure, (axes,) = canvas(TALL / INCH, width=WIDE / INCH)
    axes.set_xlabel("K")
    axes.grid(True)
    return figure, axes


def _line(axes: Axes, number: int, x: Sequence[float], y: Sequence[float], label: str,
          off: Sequence[Sequence[float]] | None = None) -> None:
    axes.errorbar(x, y, yerr=off, color=SERIES[number % len(SERIES)], linewidth=1.6, capsize=3, label=label,
                  marker=MARKS[number % len(MARKS)], markersize=5)


def _dashed(axes: Axes, y: float, label: str) -> None:
    axes.axhline(y, color=NEUTRAL, linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def _finished(figure: Figure, axes: Axes, name: str, title: str, what: str) -> str:
    """With the legend above the panel, in as many columns as fit, and whole numbers at the ticks of K."""
    if axes.get_xlabel() == "K":
        axes.xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(WIDE // (LETTER * max(map(len, labels)) + 3 * LINE))))
    figure.set_figheight((TALL + LINE * math.ceil(len(labels) / columns)) / INCH)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.0,
                  labelspacing=0.25, borderpad=0.1)
    return svg(figure, name, title, f"{what} {IN_TABLE}")
