"""What a folder of stored hidden states holds: its manifest, samples, tokens, bytes by section and shard.

    python tools/show_shards.py runs/hidden_states/0123456789abcdef [--verify]

With `--verify` everything is read: every checksum is compared, every row must be finite and not all zero, and
tokens, mask and rows of the last state must fit their record. Each bad sample is named. The folder may be a
copy, and may be one that is still being written. Exit status: 0 when nothing is wrong, 1 when something is.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from trainer.errors import UserError  # noqa: E402
from trainer.hidden_states.base import Manifest  # noqa: E402
from trainer.hidden_states.codec import Codec  # noqa: E402
from trainer.hidden_states.index import Index  # noqa: E402
from trainer.hidden_states.reader import ShardReader  # noqa: E402
from trainer.hidden_states.shards import shard_numbers, shard_path  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes in the unit that suits them: 812 B, 3.4 MiB."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if not unit else f"{count:.3g} {UNITS[unit]}"


def facts(manifest: Manifest, index: Index) -> Table:
    tokens, last = (sum(getattr(record, name) for record in index) for name in ("tokens", "last"))
    table = Table(show_header=False, box=None)
    for name, value in (
            ("target", manifest.target), ("chat template", manifest.template), ("engine", manifest.engine),
            ("layers", f"{', '.join(map(str, manifest.tap_layers))} ({manifest.layer_convention})"),
            ("last state", f"{manifest.last_rows} rows ({manifest.last_convention})"),
            ("states", f"{manifest.dtype}, stored as {manifest.storage}, {manifest.hidden_size} wide"),
            ("samples", f"{len(index):,}"),
            ("tokens", f"{tokens:,}, of which {last:,} have their last state ({last / max(tokens, 1):.1%})")):
        table.add_row(name, str(value))
    return table


def by_section(manifest: Manifest, index: Index) -> Table:
    """Bytes of every section over all samples, and what lies between and behind them."""
    codec = Codec.of(manifest)
    tokens, total = sum(record.tokens for record in index), sum(record.length for record in index)
    sums: Counter[str] = Counter()
    for record in index:
        places = codec.places(record.id_bytes, record.tokens, record.last)
        for name, (start, end) in zip(codec.sections, places, strict=True):
            sums[name] += end - start
    sums["between sections"] = total - sum(sums.values())
    pages = sum(-(-record.length // manifest.alignment) * manifest.alignment for record in index)
    sums["up to the next page"] = pages - total
    table = Table("section", title="bytes", title_justify="left")
    for name in ("bytes", "share", "a token"):
        table.add_column(name, justify="right")
    for name, count in (*sums.items(), ("all", pages)):
        table.add_row(name, size(count), f"{count / max(pages, 1):.1%}", f"{count / max(tokens, 1):,.1f}")
    return table


def by_shard(folder: Path, index: Index) -> Table:
    """How full every shard is: bytes of samples against bytes of the file."""
    samples, used = Counter(record.shard for record in index), Counter[int]()
    for record in index:
        used[record.shard] += record.length
    table = Table("shard", title="shards", title_justify="left")
    for name in ("samples", "file", "filled"):
        table.add_column(name, justify="right")
    for number in sorted({*samples, *shard_numbers(folder)}):
        path = shard_path(folder, number)
        length = path.stat().st_size if path.exists() else 0
        table.add_row(path.name, f"{samples[number]:,}", size(length) if path.exists() else "missing",
                      f"{used[number] / length:.1%}" if length else "-")
    return table


def faults(reader: ShardReader, verify: bool) -> Iterator[str]:
    """What is wrong: cheap things always, the content of every sample when asked to `verify`."""
    index = reader.index
    if index.tail:
        yield (f"{index.path} ends in a torn record: {index.tail}; a writer was stopped there or is at work, "
               "the next one goes on")
    ends: dict[int, int] = {}
    for record in index:
        ends[record.shard] = max(ends.get(record.shard, 0), record.end)
    for number, end in sorted(ends.items()):
        path = shard_path(reader.folder, number)
        found = path.stat().st_size if path.exists() else 0
        if found < end:
            yield f"{path} is truncated: expected at least {end} bytes, found {found}"
    if verify:
        for record in index:
            yield from reader.faults(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with manifest.json, index.bin and shards")
    parser.add_argument("--verify", action="store_true", help="read everything and check it")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110, soft_wrap=not sys.stdout.isatty(),
                      markup=False)
    if not Manifest.path(options.folder).is_file():
        print(f"{options.folder} is no folder of hidden states: it has no manifest.json", file=sys.stderr)
        return 1
    try:
        reader = ShardReader(options.folder)
    except UserError as error:
        print(f"bad: {error}", file=sys.stderr)
        return 1
    manifest, index = reader.manifest, reader.index
    console.print(facts(manifest, index))
    if len(index):
        console.print(by_section(manifest, index), by_shard(options.folder, index))
    else:
        console.print("no sample is stored here")
    bad = list(faults(reader, options.verify))
    for fault in bad:
        print(f"bad: {fault}", file=sys.stderr)
    if not bad:
        print(f"nothing is wrong: {len(index):,} samples, all checksums compared" if options.verify else
              "lengths are right; --verify compares every checksum")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
