"""The report's figures, each drawn with matplotlib and returned as the text of one inline `<svg>`.

The background is transparent and every neutral stroke or text is written as `currentColor`, so that one
drawing reads on a light and on a dark page; text stays text and takes the font of the page. No drawing is
shown so narrow that its text falls below 12 pixels: its box scrolls instead. Nothing is drawn through pyplot,
so no global state and no display is touched. A figure without data is None.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from trainer.data.slices import rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

NEUTRAL = "#010203"  # a colour that nothing else uses; replaced by `currentColor` once drawn
PLAIN, DRAFTER = "#8b95a7", "#4c7df0"
SERIES = ("#4c7df0", "#12a594", "#e5843a", "#a06be0", "#d6517d", "#7a9a01")
CELL = "#2f5fe0"
WIDTH = 9.2  # inches; the page scales the drawing to its column
READABLE = 12  # pixels that text has at least, however narrow the page
IN_TABLE = "The table of all rows has the numbers."
MIDDLE, POINTS = {"ha": "center", "va": "center"}, {"textcoords": "offset points"}
ENGINES = {"in_process": "in process", "vllm": "vLLM"}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 10,
    "text.color": NEUTRAL, "axes.edgecolor": NEUTRAL, "axes.labelcolor": NEUTRAL, "xtick.color": NEUTRAL,
    "ytick.color": NEUTRAL, "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "grid.color": NEUTRAL, "grid.alpha": 0.14, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titlesize": 10, "legend.frameon": False,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "text.parse_math": False,  # names are the user's own, and a dollar sign in them is one
}  # fmt: skip


class Drawing(str):
    """An inline `<svg>`, with its title and what it was drawn from, for files of other kinds."""

    name: str
    figure: Figure


def draw(rows: list[dict], log: list[dict]) -> dict[str, str | None]:
    """All figures of a report, by name; None where the data is absent."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return {
            "heatmap": acceptance_heatmap(rows),
            "training": training_curves(log),
            "throughput": throughput_bars(rows),
            "slices": accepted_length_bars(rows),
        }


def acceptance_heatmap(rows: list[dict]) -> str | None:
    """One line a (dataset, engine, K), one cell a position: the share of drafts accepted as far as that."""
    lines = _one_a_setting([row for row in rows if row["per_position_acceptance"]])
    if not lines:
        return None
    return svg(position_heatmap(lines, [name_of(row) for row in lines], WIDTH), "heatmap",
               "Acceptance by position", "A line a data set, engine and K, a column a position of the draft; "
               "the last column is the accepted length. " + IN_TABLE)


def position_heatmap(lines: Sequence[dict], names: Sequence[str], width: float) -> Figure:
    """A named line a row, a cell a position, its accepted length behind; `width` in inches."""
    longest = max(len(row["per_position_acceptance"]) for row in lines)
    figure, (axes,) = canvas(0.36 * len(lines) + 0.75, width=width)
    for line, row in enumerate(lines):
        for position, rate in enumerate(row["per_position_acceptance"]):
            strength = 0.07 + 0.93 * min(max(rate, 0.0), 1.0)
            axes.add_patch(cell(position, line, strength))
            ink = "#ffffff" if strength > 0.75 else NEUTRAL
            axes.text(position + 0.5, line + 0.5, f"{rate:.2f}", color=ink, in_layout=False, **MIDDLE)
        length = row["mean_accepted_length"]
        axes.text(longest + 0.55, line + 0.5, f"{length:.2f}", weight="bold", **MIDDLE)
    axes.set(xlim=(0, longest + 1.1), ylim=(len(lines), 0))
    places = [position + 0.5 for position in range(longest)] + [longest + 0.55]
    axes.set_xticks(places, [*map(str, range(1, longest + 1)), "length"])
    axes.set_yticks([i + 0.5 for i in range(len(lines))], names)
    as_table(axes)
    return figure


def training_curves(log: list[dict]) -> str | None:
    """Two panels over steps: the loss, and the accepted length, estimated on batches or decoded."""
    panels = {
        "loss": {"loss": "training", "heldout_loss": "held out"},
        "accepted length": {
            "estimate": "training, estimated",
            "heldout_estimate": "held out, estimated",
            "measured": "held out, decoded",
            "estimate_walk": "held out, the same walk estimated",
            "train_walk": "known samples, walked",
        },
    }
    drawn = {title: {key: _points(log, key) for key in keys} for title, keys in panels.items()}
    drawn = {
        title: curves for title, curves in drawn.items() if any(len(curve) > 1 for curve in curves.values())
    }
    if not drawn:
        return None
    figure, panel = canvas(3.0, len(drawn))
    for axes, (title, curves) in zip(panel, drawn.items(), strict=True):
        for colour, (key, points) in zip(SERIES, curves.items(), strict=False):
            _curve(axes, points, panels[title][key], colour, noisy=key in ("loss", "estimate"))
        axes.set(title=title, xlabel="step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(True)
        axes.legend()
    return svg(figure, "training", "Training", f"{' and '.join(drawn)} over the steps of the training.")


def throughput_bars(rows: list[dict]) -> str | None:
    """A pair of bars a (K, users): plain decoding beside the drafter under its speedup; a panel an engine."""
    panels: dict[tuple[str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (_order(row)[:-2], row.get("users") or 1, _setting(row))):
        if row["tok_s"] and row["baseline_tok_s"] and "/" not in row["dataset"]:
            panels.setdefault((row.get("engine", ""), row["dataset"]), []).append(row)
    if not panels:
        return None
    figure, panel = canvas(2.9 * len(panels), len(panels), beside=False)
    for axes, ((engine, dataset), lines) in zip(panel, panels.items(), strict=True):
        places = range(len(lines))
        for side, key, colour, label in (
            (-0.2, "baseline_tok_s", PLAIN, "plain"),
            (0.2, "tok_s", DRAFTER, "drafter"),
        ):
            axes.bar([x + side for x in places], [row[key] for row in lines], 0.36, color=colour, label=label)
        for x, row in enumerate(lines):
            factor = f"{row['speedup']:.2f}x" if row["speedup"] is not None else ""
            axes.annotate(
                factor, (x + 0.2, row["tok_s"]), (0, 3), ha="center", weight="bold", **POINTS
            )
        axes.set_xticks(places, [f"K={row['num_speculative_tokens']}\n{users(row)}" for row in lines])
        axes.set(title=f"{ENGINES.get(engine, engine)}, {dataset}", ylabel="tokens/s")
        axes.set_xlim(-0.7, max(len(lines), 6) - 0.3)
        axes.margins(y=0.14)
        axes.tick_params(axis="x", length=0)
        axes.grid(True, axis="y")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.0)
    what = f"Tokens a second without and with the drafter. {IN_TABLE}"
    return svg(figure, "throughput", "Throughput", what)


def accepted_length_bars(rows: list[dict]) -> str | None:
    """The accepted length by slice, one bar a (engine, K); the dashed line is plain decoding."""
    lines = _one_a_setting(rows)
    series = sorted({_setting(row) for row in lines if "/" in row["dataset"]})
    lines = [row for row in lines if _setting(row) in series]
    if not lines:
        return None
    datasets = list(dict.fromkeys(row["dataset"] for row in lines))
    height = 0.8 / len(series)
    figure, (axes,) = canvas(0.9 + len(datasets) * (0.2 + 0.24 * len(series)))
    for number, (engine, k) in enumerate(series):
        own = [row for row in lines if _setting(row) == (engine, k)]
        places = [datasets.index(row["dataset"]) + (number + 0.5) * height - 0.4 for row in own]
        lengths = [row["mean_accepted_length"] for row in own]
        label = f"{ENGINES.get(engine, engine)}, K={k}"
        axes.barh(places, lengths, height * 0.86, color=SERIES[number % len(SERIES)], label=label)
        for place, length in zip(places, lengths, strict=True):
            axes.annotate(f"{length:.2f}", (length, place), (4, 0), va="center", **POINTS)
    axes.axvline(1.0, color=NEUTRAL, linewidth=0.9, linestyle=(0, (3, 3)), alpha=0.7)
    axes.set_yticks(range(len(datasets)), datasets)
    axes.set(
        xlabel="accepted length (tokens a target step)", ylim=(len(datasets) - 0.4, -0.6), xlim=(0, None)
    )
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.0)
    return svg(figure, "slices", "Accepted length by slice", IN_TABLE)


def users(row: dict) -> str:
    """'1 user', '8 users'; a row that does not say was measured with one."""
    count = row.get("users") or 1
    return f"{count} user" if count == 1 else f"{count} users"


def engine_of(row: dict) -> str:
    """'vLLM', 'in process'; '' for a row that does not say."""
    return ENGINES.get(row.get("engine", ""), row.get("engine", ""))


def _one_a_setting(rows: list[dict]) -> list[dict]:
    """Acceptance does not depend on users: of rows that differ in that alone, the one with the fewest."""
    kept: dict[tuple, dict] = {}
    for row in sorted(rows, key=_order):
        kept.setdefault((row["dataset"], *_setting(row)), row)
    return list(kept.values())


def _order(row: dict) -> tuple:
    """All prompts before their slices, the server before the process, then K and users ascending."""
    engine, k = _setting(row)
    whole, _, name = row["dataset"].partition("/")
    return name != "", whole, rank(name), engine != "vllm", engine, k, row.get("users") or 1


def _setting(row: dict) -> tuple[str, int]:
    return row.get("engine", ""), row["num_speculative_tokens"]


def name_of(row: dict) -> str:
    """'heldout/math, vLLM, K=3'."""
    return f"{row['dataset']}, {engine_of(row)}, K={row['num_speculative_tokens']}"


def _points(log: list[dict], key: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[key]) for entry in log if isinstance(entry.get(key), int | float)]


def _curve(axes: Axes, points: list[tuple[float, float]], label: str, colour: str, noisy: bool) -> None:
    """One curve; a long noisy one is drawn faintly under its running mean, which the legend says. Few points
    are marked, one alone is nothing but its mark."""
    if not points:
        return
    steps, values = zip(*points, strict=True)
    window = len(points) // 20
    if not noisy or window < 3:
        marker = "o" if len(points) <= (3 if noisy else 40) else None
        axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
    means = [sum(values[i - window : i]) / window for i in range(window, len(values) + 1)]
    axes.plot(steps[window - 1 :], means, color=colour, linewidth=1.8, label=f"{label} (mean of {window})")


def cell(x: int, y: int, strength: float, colour: str = CELL) -> Patch:
    """A cell that fades into the page, light or dark, as its value falls."""
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.07"
    return FancyBboxPatch(
        (x + 0.04, y + 0.06), 0.92, 0.88, boxstyle=shape, color=colour, alpha=strength, linewidth=0,
        in_layout=False,
    )


def as_table(axes: Axes) -> None:
    """Columns named above, no frame and no ticks."""
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def canvas(height: float, panels: int = 1, beside: bool = True,
           width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """An empty drawing of `width` x `height` inches with its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    grid = figure.subplots(*((1, panels) if beside else (panels, 1)), squeeze=False)
    return figure, list(grid.flat)


def svg(figure: Figure, prefix: str, title: str, what: str) -> Drawing:
    """The drawing as an element that can stand in a page beside others: ids of its own, no namespaces, a
    title and a description for whoever does not see it."""
    from matplotlib import rcParams

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", lambda tag: _lean(tag[0]), text).replace(NEUTRAL, "currentColor")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = text.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    least = figure.get_figwidth() * 72 * READABLE / rcParams["font.size"]
    named = (f' role="img" aria-labelledby="{prefix}-title {prefix}-what" width="100%" '
             f'style="min-width:{least:.0f}px;max-width:{1.3 * least:.0f}px"><title id="{prefix}-title">'
             f'{escape(title)}</title><desc id="{prefix}-what">{escape(what)}</desc>')
    drawing = Drawing(text.replace(">", named, 1))
    drawing.name, drawing.figure = title, figure
    return drawing


def _lean(tag: str) -> str:
    """A tag without what nobody refers to, what the page decides, and what no eye can see."""
    dropped = (r' xmlns(:\w+)?="[^"]*"', r' id="[a-z\d]+_\d+"', r" font-family: [^;]*;", r"\n",
               r' transform="rotate\(-0 [^"]*"', r"(?<=\.\d\d)\d+")
    if tag.startswith("<svg"):
        dropped += (r' (width|height)="[^"]*"',)
    return re.sub("|".join(dropped), "", tag).replace("xlink:href=", "href=")
