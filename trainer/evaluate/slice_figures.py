"""What was measured of each slice of the held-out prompts while a drafter was trained, over the steps."""

from __future__ import annotations

from trainer.data.slices import parsed
from trainer.evaluate.figures import IN_TABLE, SERIES, STYLE, canvas, svg
from trainer.training.measuring import SLICE

PANEL = 2.6  # inches


def by_kind(figures: dict[str, float]) -> dict[str, dict[str, str]]:
    """The keys of slices in a line of the log, by kind and name."""
    found: dict[str, dict[str, str]] = {}
    for key in figures:
        if key.startswith(SLICE):
            kind, name = parsed(key.removeprefix(SLICE))
            found.setdefault(kind, {})[name] = key
    return found


def curves(log: list[dict]) -> str | None:
    """A panel a kind, a line a slice; None where none was measured twice."""
    import matplotlib

    measured = [entry for entry in log if by_kind(entry)]
    if len(measured) < 2:
        return None
    panels = by_kind({key: 0.0 for entry in measured for key in entry})
    with matplotlib.rc_context(STYLE):
        figure, panel = canvas(PANEL * len(panels), len(panels), beside=False)
        for axes, (kind, names) in zip(panel, panels.items(), strict=True):
            for number, (name, key) in enumerate(names.items()):
                steps, values = zip(*[(each["step"], each[key]) for each in measured if key in each],
                                    strict=True)
                axes.plot(steps, values, color=SERIES[number % len(SERIES)], linewidth=1.8, marker="o",
                          markersize=3.5, linestyle="--" if number >= len(SERIES) else "-", label=name)
            axes.set(title=kind, ylabel="accepted length")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(True)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        panel[-1].set_xlabel("step")
        return svg(figure, "slice-curves", "Accepted length by slice, while training",
                   f"A panel a kind of slice, a line a slice, over the steps. {IN_TABLE}")
