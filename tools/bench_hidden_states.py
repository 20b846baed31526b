"""Measures hidden states, everything within one run and in turns.

    python tools/bench_hidden_states.py read [--storage native] [--cache FOLDER]
    python tools/bench_hidden_states.py extract [KEY=VALUE ...]

`read` compares reading a cache with copying the same bytes out of the page cache into fresh buffers of the
same size, which is what no reader can beat: `never` and `first` are `ShardReader` with that `verify`, the
latter new in every round, so that every checksum is compared and every page mapped for the first time. Of the
same samples in eight bits half the bytes are read and as many are handed over: `of_copy` is then against a
copy of the bytes read, `of_native` against one of the bytes handed over. Goals: `never` at 0.7 or more of a
copy of as many bytes as are handed over.

`extract` runs a vLLM server with the connector (settings as of `python -m trainer`, those of target_engine=
vllm among them; a running one is joined by target_engine.runtime.state_urls) and compares, on this server and
with the same rows: `plain`, prefill alone (one token is asked for and no states); `states`, states fetched
and checked; `stored`, these appended to a cache and committed, as the stage does it. Goal: `stored` at 0.9 of
`plain` or more.

Each round goes once through all samples with every arm, and the order of the arms changes from round to
round. A ratio is taken within a round; medians, least and most are shown. Reading is timed by the processor
time of this process, since all of it is in the page cache and neighbours shall not count; extraction by the
clock. Exit status 1 when a goal is missed and --assert was given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from turns import Call, by, in_turns, ratios, spread  # noqa: E402

from trainer._paths import find  # noqa: E402
from trainer.check import check  # noqa: E402
from trainer.compose import compose_configuration  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.hidden_states.base import Manifest  # noqa: E402
from trainer.hidden_states.codec import HEAD, Codec  # noqa: E402
from trainer.hidden_states.index import Record  # noqa: E402
from trainer.hidden_states.mapped import ID, Shard, Stored  # noqa: E402
from trainer.hidden_states.reader import ShardReader  # noqa: E402
from trainer.hidden_states.shards import GIB, shard_path  # noqa: E402
from trainer.hidden_states.writer import ShardWriter  # noqa: E402
from trainer.pipeline import Stage, build  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.records import HiddenStates, Sample, Sampling  # noqa: E402

STORAGES = ("native", "float8_e4m3fn")
TITLES = {"gb_per_s": "GB/s", "tokens_per_s": "tokens/s", "of_copy": "of a copy", "of_native": "of a native "
          "copy", "of_plain": "of plain", "us_per_sample": "us a sample"}


def drawn_samples(options: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Random tokens, half to one and a half times the mean length; answers take the last two thirds."""
    draw, samples = random.Random(0), []
    for number in range(options.samples):
        rows = draw.randint(options.tokens // 2, options.tokens * 3 // 2)
        mask = tuple(place >= rows // 3 for place in range(rows))
        samples.append(Sample(f"sample-{number}", tuple(draw.randrange(vocabulary) for _ in range(rows)),
                              mask))
    return samples


def make_cache(folder: Path, storage: Any, options: argparse.Namespace) -> None:
    """Random states of the asked-for shape."""
    manifest = Manifest("random", "none", list(range(1, options.layers + 1)), options.hidden, options.dtype,
                        storage, "supervised", "bench")
    codec, draw = Codec.of(manifest), random.Random(1)
    most = 2 * options.tokens
    pool = torch.randn(most, (options.layers + 1) * options.hidden,
                       generator=torch.Generator().manual_seed(0)).to(codec.dtype)
    folder.mkdir()
    with ShardWriter(folder, manifest, 8 * GIB) as writer:
        for sample in drawn_samples(options, 50_000):
            begin = draw.randrange(most - len(sample.tokens) + 1)
            part = pool[begin:begin + len(sample.tokens)]
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
    if not samples:
        raise UserError(f"{reader.folder} holds no sample to read; expected a cache with some")
    return samples, found


def read_arms(folder: Path, samples: list[Sample], stored: list[Stored]) -> dict[str, Call]:
    """What is timed; each goes once through all samples. The copy is one call for the layers and one for the
    kept rows of the last state, into buffers as large as the bytes of a reader's tensors."""
    order = random.Random(1).sample(range(len(samples)), len(samples))
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


def read(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    arms: dict[str, Call] = {}
    sizes: dict[str, int] = {}
    with ExitStack() as stack:
        folders = [options.cache]
        if options.cache is None:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hidden-states-",
                                                                        dir=options.dir)))
            folders = [made / storage for storage in STORAGES if options.storage in ("both", storage)]
            for folder in folders:
                make_cache(folder, folder.name, options)
        for folder in folders:
            reader = ShardReader(folder)
            storage = reader.manifest.storage
            samples, stored = stored_samples(reader)
            sizes[storage] = sum(end - start for each in stored for start, end in each.places[len(HEAD):])
            arms |= {f"{storage}: {name}": arm for name, arm in read_arms(folder, samples, stored).items()}
        seconds = in_turns(arms, options.rounds, by(time.process_time))
        manifest = reader.manifest
    figures, goals = {}, []
    for name, times in seconds.items():
        storage = name.partition(":")[0]
        figures[name] = {"gb_per_s": spread([sizes[storage] / each / 1e9 for each in times]),
                         "of_copy": ratios(seconds[f"{storage}: copy"], times),
                         "us_per_sample": spread([each / len(samples) * 1e6 for each in times])}
        if "native: copy" in seconds:
            figures[name]["of_native"] = ratios(seconds["native: copy"], times)
            if name.endswith("never"):
                goals.append(goal(figures, name, "of_native", 0.7))
    return {"what": "read", "samples": len(samples), "tokens": sum(len(sample.tokens) for sample in samples),
            "bytes": sizes, "dtype": manifest.dtype, "layers": len(manifest.tap_layers),
            "hidden_size": manifest.hidden_size, "arms": figures, "goals": goals}


def extract(options: argparse.Namespace) -> dict[str, Any]:
    configuration = compose_configuration(["target_engine=vllm", *options.settings], find())
    if problems := check(configuration, find().groups(), Stage):
        raise UserError("; ".join(problems))
    target, engine, stage = (build(configuration.settings[name])
                             for name in ("target", "target_engine", "hidden_states"))
    layers = sorted(set(target.tap_layers))
    manifest = Manifest("random", "none", layers, target.config["hidden_size"], stage.dtype, stage.storage,
                        stage.last_rows, engine.origin)
    samples = drawn_samples(options, target.config["vocab_size"])
    rows = [sample.tokens for sample in samples]
    tokens = sum(map(len, rows))
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hidden-states-",
                                                                    dir=options.dir)))
        stack.enter_context(engine.load(target.folder, target.end_ids))
        next(engine.hidden_states(rows[:1], layers))  # starts the server, or joins it
        server, every = engine.states_server, Sampling(1, 0.0, 1.0, 0)

        def stored() -> None:
            with tempfile.TemporaryDirectory(dir=home) as folder, \
                    ShardWriter(Path(folder), manifest, 8 * GIB) as writer:
                for sample, states in zip(samples, engine.hidden_states(rows, layers), strict=True):
                    writer.append(sample, states)

        seconds = in_turns({"plain": lambda: void(server.complete(rows, every, engine.in_flight)),
                            "states": lambda: void(list(engine.hidden_states(rows, layers))),
                            "stored": stored}, options.rounds, by(time.perf_counter))
    figures = {name: {"tokens_per_s": spread([tokens / each for each in times]),
                      "of_plain": ratios(seconds["plain"], times)} for name, times in seconds.items()}
    codec = Codec.of(manifest)
    size = sum(codec.stored_bytes(len(sample.id), len(sample.tokens), int(codec.kept(sample.loss_mask).sum()),
                                  manifest.alignment) for sample in samples)
    return {"what": "extract", "samples": len(samples), "tokens": tokens, "bytes": {stage.storage: size},
            "dtype": stage.dtype, "layers": len(layers), "hidden_size": manifest.hidden_size,
            "engine": engine.origin, "target": target.name, "in_flight": engine.in_flight, "arms": figures,
            "goals": [goal(figures, "stored", "of_plain", 0.9)]}


def void(_: object) -> None:
    """Drops what an arm gives back."""


def goal(figures: dict[str, Any], arm: str, ratio: str, least: float) -> dict[str, Any]:
    found = figures[arm][ratio]["median"]
    return {"arm": arm, "ratio": ratio, "least": least, "found": found, "met": found >= least}


def machine(options: argparse.Namespace) -> dict[str, Any]:
    return {"cores": len(os.sched_getaffinity(0)), "threads": options.threads, "load": os.getloadavg()[0],
            "torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]]}


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    sizes = ", ".join(f"{size / GIB:.3g} GiB {storage}" for storage, size in found["bytes"].items())
    table = Table("arm", title_justify="left", title=(
        f"{found['what']}: {found['samples']:,} samples, {found['tokens']:,} tokens, {sizes}; "
        f"{found['dtype']}, {found['layers']} layers of {found['hidden_size']} and the last"))
    columns = [name for name in TITLES if any(name in arm for arm in found["arms"].values())]
    for name in columns:
        table.add_column(TITLES[name], justify="right")
    for name, arm in found["arms"].items():
        table.add_row(name, *(f"{arm[each]['median']:.3g}  ({arm[each]['least']:.3g} .. "
                              f"{arm[each]['most']:.3g})" for each in columns))
    Console(width=130).print(table)
    for each in found["goals"]:
        print(f"goal {'met' if each['met'] else 'missed'}: {each['arm']} at {each['found']:.3f} "
              f"{TITLES[each['ratio']]}, {each['least']} or more was wanted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    reading = commands.add_parser("read", help="a cache against a copy out of the page cache")
    reading.add_argument("--cache", type=Path, help="an existing one; else some of random states are made")
    for name, value, text in (("layers", 5, "besides the last state"), ("hidden", 576, "hidden size")):
        reading.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    reading.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    reading.add_argument("--storage", default="both", choices=("both", *STORAGES))
    reading.set_defaults(measure=read)
    extracting = commands.add_parser("extract", help="extraction through vLLM against prefill alone")
    extracting.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as of python -m trainer")
    extracting.set_defaults(measure=extract)
    for each, samples in ((reading, 512), (extracting, 32)):
        each.add_argument("--dir", type=Path, help="where to make caches; default: that of temporary files")
        each.add_argument("--samples", type=int, default=samples, help=f"how many (default {samples})")
        each.add_argument("--tokens", type=int, default=200,
                          help="mean length; half to one and a half (default 200)")
        each.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
        each.add_argument("--threads", type=int, default=1, help="threads of torch here (default 1)")
        each.add_argument("--json", type=Path, help="write the figures there")
        each.add_argument("--assert", action="store_true", dest="strict", help="fail when a goal is missed")
    options = parser.parse_args()
    found = options.measure(options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps({**found, "machine": machine(options)}, indent=1) + "\n")
    return int(options.strict and not all(each["met"] for each in found["goals"]))


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
