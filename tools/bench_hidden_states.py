"""Measures stored hidden states, everything within one run and in turns.

    python tools/bench_hidden_states.py read [--storage float8_e4m3fn] [--cache FOLDER] [--json FILE]

`read` compares reading a cache with copying the same bytes out of the page cache into fresh buffers of the
same size, which is what no reader can beat: `never` and `first` are `ShardReader` with that `verify`, the
latter new in every round, so that every checksum is compared and every page mapped for the first time. Each
round reads all samples in the same shuffled order with every arm, and the order of the arms changes from
round to round. A ratio is taken within a round. Goal: `never` at 0.7 of the copy or more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from trainer.errors import UserError  # noqa: E402
from trainer.hidden_states.base import Manifest  # noqa: E402
from trainer.hidden_states.codec import HEAD, Codec  # noqa: E402
from trainer.hidden_states.index import Record  # noqa: E402
from trainer.hidden_states.mapped import ID, Shard, Stored  # noqa: E402
from trainer.hidden_states.reader import ShardReader  # noqa: E402
from trainer.hidden_states.shards import GIB, shard_path  # noqa: E402
from trainer.hidden_states.writer import ShardWriter  # noqa: E402
from trainer.records import HiddenStates, Sample  # noqa: E402

Arm = Callable[[], None]


def make_cache(folder: Path, options: argparse.Namespace) -> None:
    """Random states of the asked-for shape; answers take the last two thirds of a sample."""
    manifest = Manifest("random", "none", list(range(1, options.layers + 1)), options.hidden, options.dtype,
                        options.storage, "supervised", "bench")
    codec, draw = Codec.of(manifest), random.Random(0)
    most = 2 * options.tokens
    pool = torch.randn(most, (options.layers + 1) * options.hidden,
                       generator=torch.Generator().manual_seed(0)).to(codec.dtype)
    with ShardWriter(folder, manifest, 8 * GIB) as writer:
        for number in range(options.samples):
            rows = draw.randint(options.tokens // 2, options.tokens * 3 // 2)
            mask = tuple(place >= rows // 3 for place in range(rows))
            sample = Sample(f"sample-{number}", tuple(draw.randrange(50_000) for _ in range(rows)), mask)
            begin = draw.randrange(most - rows + 1)
            part = pool[begin:begin + rows]
            split = options.layers * options.hidden
            writer.append(sample, HiddenStates(part[:, :split], part[:, split:]))


def stored_samples(reader: ShardReader) -> tuple[list[Sample], list[Stored]]:
    """What lies in a cache, as samples to ask for and as mapped bytes to copy."""
    shards: dict[int, Shard] = {}

    def stored(record: Record) -> Stored:
        path = shard_path(reader.folder, record.shard)
        if record.shard not in shards:
            shards[record.shard] = Shard(path, path.stat().st_size)
        return Stored(shards[record.shard], record, reader.stored)

    found = [stored(record) for record in reader.index]
    samples = []
    for each in found:
        each.fetch([(ID, len(each.places) - 1)], cold=False)
        samples.append(Sample(each.name(), tuple(each.tokens().tolist()), tuple(each.mask().tolist())))
    return samples, found


def read_arms(folder: Path, order: list[int], samples: list[Sample], stored: list[Stored]) -> dict[str, Arm]:
    """What is timed; each goes once through all samples. The copy is one call for the layers and one for the
    kept rows of the last state, into buffers as large as a reader makes them."""
    layers = range(len(HEAD), len(stored[0].places) - 1)
    parts = [(each.span(layers.start, layers.stop - 1).numpy(), each.span(layers.stop, layers.stop).numpy())
             for each in stored]
    row = parts[0][0].nbytes // len(samples[0].tokens) // len(layers)
    sizes = [(len(part), len(sample.tokens) * row) for (part, _), sample in zip(parts, samples, strict=True)]
    kept = ShardReader(folder, verify="never")

    def copy() -> None:
        for number in order:
            states, last = (torch.empty(size, dtype=torch.uint8).numpy() for size in sizes[number])
            np.copyto(states, parts[number][0])
            np.copyto(last[:len(parts[number][1])], parts[number][1])

    def read(reader: ShardReader) -> None:
        for number in order:
            reader.get(samples[number])

    return {"copy": copy, "never": lambda: read(kept),
            "first": lambda: read(ShardReader(folder, verify="first"))}


def in_turns(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds + 1):
        for name in names[number % len(names):] + names[:number % len(names)]:
            start = time.perf_counter()
            arms[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def read(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        folder = options.cache
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="hidden-states-", dir=options.dir)
            folder = Path(stack.enter_context(made))
            make_cache(folder, options)
        reader = ShardReader(folder)
        samples, stored = stored_samples(reader)
        if not samples:
            raise UserError(f"{folder} holds no sample to read; expected a cache with some")
        order = random.Random(1).sample(range(len(samples)), len(samples))
        size = sum(end - start for each in stored for start, end in each.places[len(HEAD):])
        seconds = in_turns(read_arms(folder, order, samples, stored), options.rounds)
        manifest = reader.manifest
    ratios = {name: [base / own for base, own in zip(seconds["copy"], times, strict=True)]
              for name, times in seconds.items()}
    return {"what": "read", "samples": len(samples), "tokens": sum(len(sample.tokens) for sample in samples),
            "bytes": size, "storage": manifest.storage, "dtype": manifest.dtype,
            "layers": len(manifest.tap_layers), "hidden_size": manifest.hidden_size,
            "arms": {name: {"gb_per_s": spread([size / each / 1e9 for each in times]),
                            "of_copy": spread(ratios[name]),
                            "us_per_sample": spread([each / len(samples) * 1e6 for each in times])}
                     for name, times in seconds.items()}}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def machine(options: argparse.Namespace) -> dict[str, Any]:
    return {"cores": len(os.sched_getaffinity(0)), "threads": options.threads, "load": os.getloadavg()[0],
            "torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]]}


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("arm", title=f"{found['what']}: {found['samples']:,} samples, {found['bytes'] / GIB:.3g} "
                               "GiB of "
                  f"{found['storage']} {found['dtype']}, {found['layers']} layers of {found['hidden_size']}",
                  title_justify="left")
    for name in ("GB/s", "of the copy", "us a sample"):
        table.add_column(name, justify="right")
    for name, arm in found["arms"].items():
        table.add_row(name, *(f"{each['median']:.3g}  ({each['least']:.3g} .. {each['most']:.3g})"
                              for each in (arm["gb_per_s"], arm["of_copy"], arm["us_per_sample"])))
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    reading = commands.add_parser("read", help="a cache against a copy out of the page cache")
    reading.add_argument("--cache", type=Path, help="an existing one; else one of random states is made")
    reading.add_argument("--dir", type=Path, help="where to make it; default: the folder for temporary files")
    for name, value, text in (("samples", 512, "how many"), ("tokens", 200, "mean length; half to one and a "
                                                                            "half"),
                              ("layers", 5, "besides the last state"), ("hidden", 576, "hidden size")):
        reading.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    reading.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    reading.add_argument("--storage", default="native", choices=("native", "float8_e4m3fn"))
    reading.set_defaults(measure=read)
    for each in commands.choices.values():
        each.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
        each.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
        each.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    try:
        found = options.measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(found)
    if options.json:
        options.json.write_text(json.dumps({**found, "machine": machine(options)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
