"""How well the tuner chooses on sweeps whose outcome is known.

    python tools/replay_tuner.py ROWS.json [--budget 3] [--verbose]

Every series of ROWS.json (one drafter and class of traffic, all K measured) is replayed: the tuner sees one K
after another, as it asks for them, --budget at most, and settles on a K of the series, or on plain decoding.
Prints one JSON line: `share_97` and `share_95` are the shares of series whose choice reaches 97 % and 95 % of
the best measured throughput, plain decoding included. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.errors import UserError  # noqa: E402
from trainer.evaluate.traffic import CLASS, DRAFTER, grouped, points, read_rows, usable  # noqa: E402
from trainer.evaluate.tuning import replay  # noqa: E402
from trainer.progress import exit_status  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json")
    parser.add_argument("--budget", type=int, default=3, help="how many K of a series may be measured")
    parser.add_argument("--verbose", action="store_true", help="a line for each series on standard error")
    options = parser.parse_args()
    rows, left_out = usable(read_rows(options.rows))
    if not rows or options.budget < 1:
        raise UserError(f"{options.rows} has {len(rows)} rows to replay (left out: {dict(left_out)}) and "
                        f"--budget is {options.budget}; give rows with a K, both speeds and acceptance by "
                        "position, and a budget of at least 1")
    reached, measured = [], 0
    for series, own in grouped(rows, (*DRAFTER, *CLASS)).items():
        found = points(own)
        k, order = replay(found, options.budget)
        speeds = {0: 1.0, **{each: point.speedup for each, point in found.items()}}
        reached.append(speeds[k] / max(speeds.values()))
        measured += len(order)
        if options.verbose:
            print(f"{', '.join(str(name) for name in series if name is not None)}: measured {order}, chose "
                  f"{k}, {reached[-1]:.1%} of the best", file=sys.stderr)
    share = {f"share_{bound}": round(sum(each >= bound / 100 for each in reached) / len(reached), 4)
             for bound in (97, 95)}
    print(json.dumps({**share, "series": len(reached), "least": round(min(reached), 4),
                      "mean": round(sum(reached) / len(reached), 4),
                      "measured_a_series": round(measured / len(reached), 2),
                      "rows_left_out": sum(left_out.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
