"""The draft length to serve with, for every class of traffic that was measured.

    python tools/tune.py ROWS.json [--export FOLDER] [--out FOLDER]

ROWS.json has rows of measurements, as evaluate and sweep leave them (or a report.json that has them). Prints
what a round costs, the speed-up that is expected of every K, the K of each class, the schedule of K by batch
size, and what to doubt; writes all of it to tuning.json. With --export, the default K and the schedule go
into an exported folder as well: the folder of a finished stage export, or a copy of one of its formats. Exit
status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer._folders import require_folder, write_json  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.evaluate.traffic import Lengths, drafter_of, read_rows, tune  # noqa: E402
from trainer.evaluate.tuning_table import print_tuning  # noqa: E402
from trainer.export.serve_line import draft_lengths  # noqa: E402
from trainer.export.tuned import exported_facts, possible_lengths, write_tuned  # noqa: E402
from trainer.progress import exit_status  # noqa: E402


def choices(given: list[int] | None, own: dict | None) -> Lengths | None:
    """The K to choose among: those given, or those of the exported drafter; None: what the rows say."""
    def lengths(method: str, longest: int) -> Sequence[int]:
        if given:
            return sorted(set(given))
        return possible_lengths(own) if own and own["method"] == method else range(1, longest + 1)

    return lengths if given or own else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="an exported folder, which is changed")
    parser.add_argument("--method", help="what the rows call the method of the exported folder")
    parser.add_argument("--k", type=int, action="append", help="a K to choose among, repeatable; else all")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER",
                        help="where tuning.json goes")
    options = parser.parse_args()
    if any(k < 1 for k in options.k or ()):
        parser.error("--k takes lengths of at least 1; plain decoding is always a choice")
    own = exported_facts(options.export) if options.export else None
    if own and (beyond := sorted({*(options.k or ())} - {*possible_lengths(own)})):
        raise UserError(f"--k {beyond[-1]} is a draft length that no server takes of the drafter in "
                        f"{options.export}; give some of {', '.join(map(str, possible_lengths(own)))}")
    if own and options.method:
        own = {**own, "method": options.method}
    tuning = tune(read_rows(options.rows), choices(options.k, own))
    require_folder(options.out)
    write_json(options.out / "tuning.json", tuning)
    print_tuning(tuning)
    print(options.out / "tuning.json", flush=True)
    if own:
        write_tuned(options.export, drafter_of(tuning, own["method"]))
        now = exported_facts(options.export)
        print(f"{options.export}: serve it with {json.dumps(draft_lengths(now))[1:-1]}" if now["speculate"]
              else f"{options.export}: marked as not worth speculating with", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
