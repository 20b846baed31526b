"""How large a draft vocabulary has to be: what share of the target's own answers each size covers.

    python tools/draft_vocabulary.py runs/responses/0123456789abcdef
    python tools/draft_vocabulary.py runs

Takes a folder with `responses.jsonl`, or a run root, whose newest answers are taken. Only supervised training
tokens count, the most frequent come first, and where answers are of several categories each has a column;
special tokens, which every draft vocabulary has, are not added here. A token outside
`drafter.draft_vocab_size` can never be drafted, one that is never said is work for nothing. Sizes beyond the
target's vocabulary are left out, where the answers' record knows it. Exit status: 0, or 1 when there are no
answers to count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from trainer.architectures.vocabulary import SIZES, choose, coverage, curve  # noqa: E402
from trainer.data.responses import RESPONSES, read_samples  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.training.build import count_by_category  # noqa: E402

SHARES = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
SMALLER = (1024, 2048, 4096)


def answers(folder: Path) -> Path:
    """The folder of answers that `folder` is, or whose newest ones it has; raises FileNotFoundError."""
    if (folder / "latest.json").is_file():
        folder = Path(json.loads((folder / "latest.json").read_text()).get("responses", folder))
    if not (folder / RESPONSES).is_file():
        raise FileNotFoundError(f"{folder} has no {RESPONSES}; give the folder of a stage responses, or a "
                                "run root with a finished one")
    return folder


def vocabulary(folder: Path) -> float:
    """How many tokens the target has that gave the answers; infinity where their record does not say."""
    path = folder / "stage.json"
    record = json.loads(path.read_text())["record"] if path.is_file() else {}
    return record.get("vocabulary", float("inf"))


def by_category(counts: torch.Tensor, parts: dict[str, torch.Tensor], sizes: list[int]) -> Table:
    """What the vocabularies of all tokens cover of each category; the least covered is red."""
    names = sorted(name for name, part in parts.items() if int(part.sum()))
    table = Table("drafter.draft_vocab_size", title="tokens covered, by category", title_justify="left")
    for name in names:
        table.add_column(Text(name), justify="right")
    for size in sizes:
        ids = choose(counts, min(size, counts.numel()), ())
        shares = [coverage(parts[name], ids) for name in names]
        table.add_row(f"{size:,}", *(Text(f"{share:.2%}", "red" if share == min(shares) < 1 else "")
                                     for share in shares))
    return table


def by_size(counts: torch.Tensor, sizes: list[int]) -> Table:
    distinct = int((counts > 0).sum())
    shares = dict.fromkeys(sizes, 1.0) | curve(counts, sizes)
    table = Table("drafter.draft_vocab_size", title="by size", title_justify="left")
    for name in ("tokens covered", "left out of 1,000", "rows never seen"):
        table.add_column(name, justify="right")
    for size in sizes:
        table.add_row(f"{size:,}", f"{shares[size]:.2%}", f"{1000 * (1 - shares[size]):.2f}",
                      f"{max(0, size - distinct):,}")
    return table


def by_share(counts: torch.Tensor) -> Table:
    """The smallest vocabulary for each share."""
    reached = counts.sort(descending=True).values.cumsum(0)
    table = Table("tokens covered", "smallest drafter.draft_vocab_size", title="by share",
                  title_justify="left")
    for share in SHARES:
        needed = int((reached < share * int(reached[-1])).sum()) + 1
        table.add_row(f"{share:.1%}", f"{needed:,}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with responses.jsonl, or a run root")
    parser.add_argument("--size", type=int, action="append", default=[], help="one more size, repeatable")
    options = parser.parse_args()
    try:
        folder = answers(options.folder)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    samples = read_samples(folder, "train")
    rows = 1 + max((max(sample.tokens) for sample in samples), default=0)
    parts = count_by_category(samples, rows)
    counts = sum(parts.values(), torch.zeros(rows, dtype=torch.int64))
    if not int(counts.sum()):
        print(f"{folder} has no supervised training token", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 110, markup=False)
    console.print(f"{folder}: {int(counts.sum()):,} supervised tokens in {len(samples):,} samples, "
                  f"{int((counts > 0).sum()):,} distinct", soft_wrap=True)
    largest = vocabulary(folder)
    sizes = sorted(size for size in {*SMALLER, *SIZES, *options.size} if 0 < size <= largest)
    several = [by_category(counts, parts, sizes)] if len(parts) > 1 else []
    console.print(by_size(counts, sizes), *several, by_share(counts))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
