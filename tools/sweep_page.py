"""The page of a sweep, from its rows alone.

    python tools/sweep_page.py ROWS.json [OUT.html] [--title TEXT]

ROWS.json has rows in the field names of published sweeps, as the stage sweep leaves them (or evaluate, or a
report.json). The page shows speed-up over K and traffic, throughput beside plain decoding, accepted length,
acceptance by position and the tuner's fit, and loads nothing; it goes to OUT.html, or else beside the rows.
Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.errors import UserError  # noqa: E402
from trainer.evaluate import html, sweep_view  # noqa: E402
from trainer.evaluate.traffic import read_rows  # noqa: E402
from trainer.progress import exit_status  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.html")
    parser.add_argument("--title", default="Sweep of draft lengths")
    options = parser.parse_args()
    html.require_extra()
    rows = read_rows(options.rows)
    if not rows:
        raise UserError(f"{options.rows} holds no rows, expected some; name rows.json of a finished sweep")
    out = options.out or options.rows.with_suffix(".html")
    try:
        out.write_text(html.render_sweep(sweep_view.view(rows), options.title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"OUT.html={out} cannot be written ({error.strerror}); name another file") from error
    print(out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
