"""Converts a drafter's folder to another format: one of this project's, or a published checkpoint.

    python tools/convert.py FROM TO --format native
    python tools/convert.py FROM TO --format deepspec --target FOLDER_OF_THE_TARGET
    python tools/convert.py FROM TO --format speculators --target Qwen/Qwen3-8B --k 7 --set rope_theta=1000000

FROM is read strictly, whatever layout it has (speculators, z-lab, DeepSpec, HF EAGLE-3, SGLang): each key and
tensor is taken, known to mean nothing, or an error; what engines would guess is told. TO is made. `--target`
names the target, or is its folder: then an embedding and a head that are the target's are left out, or taken
from there for formats that have them. Exit status: 0, or 2 with one sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.export.conversion import Given, convert, parsed  # noqa: E402
from trainer.export.formats import LAYOUTS  # noqa: E402
from trainer.progress import exit_status  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("place", type=Path, metavar="TO")
    parser.add_argument("--format", required=True, choices=list(LAYOUTS))
    parser.add_argument("--target", help="name on the Hub, or folder, of the target")
    parser.add_argument("--target-name", help="written in place of --target where that is a folder")
    parser.add_argument("--target-layers", type=int, help="of the target, where its folder is not at hand")
    parser.add_argument("--k", type=int, help="tokens that a server drafts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of FROM's config.json, which it lacks or has wrong; repeatable")
    parser.add_argument("--max-context", type=int, help="scales rotary positions, as export.max_context does")
    options = parser.parse_args()
    folder = Path(options.target) if options.target and Path(options.target).is_dir() else None
    given = Given(options.target_name or (None if folder else options.target), folder, options.target_layers,
                  options.k, dict(map(parsed, options.set)), options.max_context)
    for line in convert(options.source, Path(os.path.abspath(options.place)), options.format, given):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
