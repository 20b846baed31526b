"""The figures of a page and its rows, as files beside it: SVG and PNG, and a table for spreadsheets."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.evaluate.figures import Drawing

ALONE = ('<svg xmlns="http://www.w3.org/2000/svg"',
         'style="color: #1a2233; background: #ffffff; font-family: sans-serif; ')
DOTS = 200  # of a PNG, an inch


def write_files(shown: Any, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """The figures in what a page shows, numbered and named by their titles, and `rows` as rows.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, drawing in enumerate(drawings(shown), 1):
        name = re.sub(r"[^a-z0-9.]+", "-", drawing.name.lower()).strip("-")[:100] or "figure"
        path = folder / f"{number:03d}-{name}.svg"
        alone = drawing.replace("<svg", ALONE[0], 1).replace('style="', ALONE[1], 1)
        path.write_text(alone + "\n", encoding="utf-8")
        drawing.figure.savefig(path.with_suffix(".png"), dpi=DOTS, facecolor="white")
    fields = list(dict.fromkeys(field for row in rows for field in row))
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


def drawings(shown: Any) -> Iterator[Drawing]:
    """Those in a value of any depth, in its order."""
    if isinstance(shown, Drawing):
        yield shown
    elif isinstance(shown, Mapping):
        yield from drawings(list(shown.values()))
    elif isinstance(shown, list | tuple):
        for each in shown:
            yield from drawings(each)
