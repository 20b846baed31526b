"""Pages that load nothing: what reports of all rooms share, the frame and style beside this file and the
forms of numbers. Every value is escaped by the template engine."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(folder: Path) -> Environment:
    """For the templates in `folder`, which extend page.html.jinja."""
    import jinja2

    found = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
    )  # fmt: skip
    found.filters |= {each.__name__: each for each in (number, compact, duration, yes_no)}
    return found


def moment(when: datetime) -> str:
    return when.strftime("%d %B %Y, %H:%M")


def number(value: float | None, digits: int) -> str:
    """A number with fixed digits; empty where nothing was measured."""
    return "" if value is None else f"{value:,.{digits}f}"


def compact(value: object) -> str:
    """A value as short as it can be read: 0.9987, 1.3e-06, 12,345, yes."""
    if isinstance(value, bool):
        return yes_no(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e6:
            return f"{value:,.0f}"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """'8.2 s', '4 min 10 s', '1 h 05 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"
