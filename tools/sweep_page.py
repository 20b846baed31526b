"""The page of a sweep, from its rows alone.

    python tools/sweep_page.py ROWS.json [OUT.html] [--title TEXT] [--files FOLDER]

ROWS.json has rows in the field names of published sweeps, as the stage sweep leaves them (or evaluate, or a
report.json). The page shows speed-up over K and traffic, throughput beside plain decoding, accepted length,
acceptance by position and the tuner's fit, and loads nothing; it goes to OUT.html, or else beside the rows.
With --files, each figure goes into a folder as well, as SVG and as PNG, and the rows as rows.csv. Exit
status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.errors import UserError  # noqa: E402
from trainer.evaluate import html, sweep_view  # noqa: E402
from trainer.evaluate.files import write_files  # noqa: E402
from trainer.evaluate.traffic import read_rows  # noqa: E402
from trainer.progress import exit_status  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.html")
    parser.add_argument("--title", default="Sweep of draft lengths")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="figures and rows as files")
    options = parser.parse_args()
    html.require_extra()
    rows = read_rows(options.rows)
    if not rows:
        raise UserError(f"{options.rows} holds no rows, expected some; name rows.json of a finished sweep")
    out = options.out or options.rows.with_suffix(".html")
    shown = sweep_view.view(rows)
    page = html.render_sweep(shown, options.title)
    try:
        out.write_text(page, encoding="utf-8")
        if options.files:
            write_files(shown, rows, options.files)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}); give OUT.html and --files a "
                        "place that can") from error
    print(out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
