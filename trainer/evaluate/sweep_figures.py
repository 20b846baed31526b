"""The figures of a sweep: small ones, as wide as a phone, in the manner of `figures`.

Lines differ by their marks as well as by their colours, and what a cell means is written into it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.evaluate.figures import (
    IN_TABLE,
    MIDDLE,
    NEUTRAL,
    PLAIN,
    POINTS,
    READABLE,
    SERIES,
    STYLE,
    Drawing,
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
WIDE, TALL, LINE, APART = 336, 200, 20, 15  # pixels: a panel, without its legend, lines of that and of text
LETTER, CELL, BAR = 7.4, 40, 17  # pixels: a letter's mean width, a cell, and a bar
INCH = 72
MARKS = "osD^vPX*"
PLAINLY = "plain decoding"
FEW = 12  # K that are named one by one at an axis
WIN, LOSS = "#2f5fe0", "#d9622b"
FAINT, STRONG = 0.06, 0.68  # of a cell's colour, so that the page's own ink reads on it
CERTAIN = 2.0  # the factor from plain decoding at which a colour is full
Waits = Mapping[int, tuple[float, float]]  # by users: milliseconds a token of one, tokens a second of all


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
             picks: Mapping[str, int]) -> Drawing:
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
            _stacked(axes, (column + 0.5, line + 0.5), [f"{own[k]:.2f}", *below],
                     weight="bold" if "pick" in below else "normal", in_layout=False)
    axes.set(xlim=(0, len(lengths)), ylim=(len(classes), 0))
    axes.set_xticks([column + 0.5 for column in range(len(lengths))], [f"K={k}" for k in lengths])
    _name_lines(axes, [line + 0.5 for line in range(len(classes))], classes)
    as_table(axes)
    return svg(figure, name, title, f"Speed-up by class of traffic and K. {IN_TABLE}")


def acceptance(name: str, title: str, lines: Sequence[dict], names: Sequence[str]) -> Drawing:
    """The share of drafts accepted as far as each position; a line a data set and K."""
    longest = max(len(row["per_position_acceptance"]) for row in lines)
    width = max(WIDE, LETTER * max(map(len, names)) + 0.85 * CELL * (longest + 1.1) + 16)
    return svg(position_heatmap(lines, names, width / INCH), name, title,
               f"A line a data set and K, a column a position, last the accepted length. {IN_TABLE}")


def throughput(name: str, title: str, methods: Mapping[str, Sequence[Speed]],
               plain: Speed | None) -> Drawing:
    """Tokens a second over K, a line a method, bars from the least to the most of repeats; plain decoding is
    the dashed line, and what lies below it loses."""
    figure, axes = _panel({speed.k for own in methods.values() for speed in own})
    speeds = [speed.tok_s for own in methods.values() for speed in own]
    for number, (method, own) in enumerate(methods.items()):
        if not own:
            continue
        off = [[speed.tok_s - speed.low for speed in own], [speed.high - speed.tok_s for speed in own]]
        _line(axes, number, [speed.k for speed in own], [speed.tok_s for speed in own], method,
              off if any(map(any, off)) else None)
    top = max(speeds)
    if plain:
        _dashed(axes, plain.tok_s, PLAINLY)
        axes.axhspan(plain.low, plain.high, color=NEUTRAL, alpha=0.12, linewidth=0)
        top = max(top, plain.high)
        if min(speeds) < plain.tok_s:
            axes.axhspan(0, plain.tok_s, color=LOSS, alpha=0.08, linewidth=0)
            axes.text(0.98, 0.04, "below: speculation loses", transform=axes.transAxes, ha="right")
    axes.set(ylabel="tokens/s", ylim=(0, 1.08 * top))
    return _finished(figure, axes, name, title, "Throughput over K, with plain decoding as a line.")


def lengths(name: str, title: str, datasets: Mapping[str, Mapping[int, float]]) -> Drawing:
    """The accepted length over K, a line a data set; the dashed line is plain decoding."""
    figure, axes = _panel({k for own in datasets.values() for k in own})
    for number, (dataset, own) in enumerate(datasets.items()):
        _line(axes, number, list(own), list(own.values()), dataset)
    _dashed(axes, 1.0, PLAINLY)
    axes.set(ylabel="tokens a step", ylim=(0.8, None))
    return _finished(figure, axes, name, title, "Accepted length over K.")


def costs(name: str, title: str, classes: Mapping[str, Fit]) -> Drawing:
    """What a round costs over K in plain steps: measured marks, the fitted line, a ring at the tuner's K."""
    figure, axes = _panel({0, *(point.k for fit in classes.values() for point in fit.points)})
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


def latency(name: str, title: str, plain: Waits, methods: Mapping[str, Waits]) -> Drawing:
    """Throughput over what a user waits for a token, a line a method, a mark a number of users."""
    figure, axes = _panel()
    axes.plot(*zip(*plain.values(), strict=True), color=NEUTRAL, linewidth=1.2, linestyle=(0, (4, 3)),
              marker=".", label=PLAINLY)
    for number, (method, own) in enumerate(methods.items()):
        if own:
            _line(axes, number, *zip(*own.values(), strict=True), method)
    axes.xaxis.get_major_locator().set_params(integer=False)
    axes.set(ylabel="tokens/s, all users", xlabel="ms a token of one user", ylim=(0, None), xlim=(0, None))
    return _finished(figure, axes, name, title, "Throughput over latency, marks in order of users.")


def bars(name: str, title: str, classes: Mapping[str, Mapping[str, float]], methods: Sequence[str],
         plain: Mapping[str, float] | None = None) -> Drawing:
    """The best speed-up of each method by class of traffic, with plain decoding as a dashed line; or their
    throughput, where `plain` says that of plain decoding in each class, which has a bar of its own."""
    if plain:
        classes = {label: {PLAINLY: plain[label], **own} for label, own in classes.items()}
    rows = sum(len(own) + _gap(own) for own in classes.values())
    figure, (axes,) = canvas((BAR * rows + 2 * LINE) / INCH, width=WIDE / INCH)
    top = max(each for own in classes.values() for each in own.values())
    place, middles = 0.0, []
    for own in classes.values():
        middles.append(place + (len(own) - 1) / 2)
        for method, each in own.items():
            colour = PLAIN if method == PLAINLY else SERIES[methods.index(method) % len(SERIES)]
            axes.barh(place, each, 0.86, color=colour, alpha=0.75,
                      label=method if method not in axes.get_legend_handles_labels()[1] else None)
            told = f"{each:,.1f}" if plain else f"{each:.2f}{' loses' if each < 1 else ''}"
            axes.annotate(told, (each if plain else max(each, 1.0), place), (4, 0), va="center", **POINTS)
            place += 1
        place += _gap(own)
    if not plain:
        _dashed(axes, 1.0, PLAINLY, upright=True)
    _name_lines(axes, middles, classes)
    axes.set(xlabel="tokens/s" if plain else "speed-up", xlim=(0, 1.3 * max(top, 0.0 if plain else 1.0)),
             ylim=(place - 1.0, -1.0))
    return _finished(figure, axes, name, title, "The fastest K of each method by class of traffic.")


def _gap(own: Mapping[str, float]) -> float:
    """Below the bars of a class, in bars: its name has two lines."""
    return max(0.6, 2.2 - len(own))


def _panel(lengths: Collection[int] = ()) -> tuple[Figure, Axes]:
    """An empty panel over K, with a tick at each of `lengths` where they are few."""
    figure, (axes,) = canvas(TALL / INCH, width=WIDE / INCH)
    axes.set_xlabel("K")
    axes.grid(True)
    if 0 < len(lengths) <= FEW:
        axes.set_xticks(sorted(lengths))
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def _stacked(axes: Axes, place: tuple[float, float], lines: Sequence[str], **how: Any) -> None:
    """Lines of text about a place, each centred (or as `how` says) by whichever font the page has."""
    shift = how.pop("shift", 0)
    for number, line in enumerate(lines):
        axes.annotate(line, place, (shift, APART * ((len(lines) - 1) / 2 - number)), **POINTS,
                      **MIDDLE | how)


def _name_lines(axes: Axes, places: Sequence[float], names: Iterable[str]) -> None:
    """Names at the left of a panel, in as many lines as they have."""
    axes.set_yticks([])
    for place, name in zip(places, names, strict=True):
        _stacked(axes, (0, place), name.split("\n"), xycoords=axes.get_yaxis_transform(), ha="right",
                 shift=-5)


def _line(axes: Axes, number: int, x: Sequence[float], y: Sequence[float], label: str,
          off: Sequence[Sequence[float]] | None = None) -> None:
    axes.errorbar(x, y, yerr=off, color=SERIES[number % len(SERIES)], linewidth=1.6, capsize=3, label=label,
                  marker=MARKS[number % len(MARKS)], markersize=5)


def _dashed(axes: Axes, at: float, label: str, upright: bool = False) -> None:
    (axes.axvline if upright else axes.axhline)(at, color=NEUTRAL, linewidth=1.2, linestyle=(0, (4, 3)),
                                                label=label)


def _finished(figure: Figure, axes: Axes, name: str, title: str, what: str) -> Drawing:
    """With the legend above the panel, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(WIDE // (LETTER * max(map(len, labels)) + 3 * LINE))))
    figure.set_figheight(figure.get_figheight() + LINE * math.ceil(len(labels) / columns) / INCH)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.0,
                  labelspacing=0.25, borderpad=0.1)
    return svg(figure, name, title, f"{what} {IN_TABLE}")
