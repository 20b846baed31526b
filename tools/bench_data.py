"""What many conversations cost on their way to training: prompts -> tokens and masks -> packed rows.

    python tools/bench_data.py PROMPTS [--conversations N] [--work FOLDER] [KEY=VALUE ...]

    python tools/bench_data.py prompts.jsonl --conversations 100000 --work /tmp/many

PROMPTS is a JSONL file of prompts, or a folder of such files. From them N conversations of one to three turns
are made, the same ones every time: questions are asked together, their words in another order, and answered
with words of others. They go through the stages `prompts` (languages, repeated and nearly repeated texts) and
`responses=as_given` (tokenised by the target's own template, that of the default recipe unless told), as in
a run, and are then packed as training does it. A call that was stopped goes on where it was when it is
repeated with the same folder; finished stages are taken as they are, and then their seconds are not counted.

Prints, behind what the stages say, one line of JSON: seconds of each part, conversations a second, the
highest resident memory of the process and what it was before anything was read, what was left out with the
reasons, and how much of the packed rows is padding. Exit status 2 with a sentence where something cannot be
used.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer import pipeline  # noqa: E402
from trainer._paths import find  # noqa: E402
from trainer.check import check  # noqa: E402
from trainer.compose import compose_configuration  # noqa: E402
from trainer.data.packing import padding, plan_epoch  # noqa: E402
from trainer.data.prompts import Jsonl  # noqa: E402
from trainer.data.report import JSON  # noqa: E402
from trainer.data.response_rows import read_samples  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

STAGES = ("prompts", "responses")
TURNS = 3  # of the longest conversations
REPEATED = 0.02  # of the conversations, so that there is something to leave out


def questions(place: Path) -> list[str]:
    """All turns of the prompts there, in the order of the files' names."""
    files = sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]
    found = [turn for file in files for prompt, _ in Jsonl(str(file)).all_rows() for turn in prompt.turns]
    if not found:
        raise UserError(f"{place} holds no prompt; give a JSONL file of prompts, or a folder of such files")
    return found


def conversations(found: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """`count` of them, some of which repeat an earlier one; each depends on its number alone."""
    for number in range(count):
        draw = random.Random(f"conversation {number}")
        if number and draw.random() < REPEATED:
            draw = random.Random(f"conversation {draw.randrange(number)}")
            draw.random()
        size = draw.randint(1, TURNS)
        yield {"id": f"c{number}", "category": f"turns {size}",
               "turns": [_mixed(draw, draw.choice(found)) for _ in range(size)],
               "answers": [_mixed(draw, draw.choice(found)) for _ in range(size)]}


def _mixed(draw: random.Random, text: str) -> str:
    """The words of a text in another order."""
    words = text.split(" ")
    draw.shuffle(words)
    return " ".join(words)


def write(path: Path, found: Sequence[str], count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in conversations(found, count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def run(path: Path, work: Path, settings: Sequence[str], seconds: dict[str, float | None]) -> dict[str, Path]:
    """The folders of the finished stages by name; `seconds` are noted, None for a stage that was there."""
    choices = find()
    configuration = compose_configuration([
        "prompts=jsonl", f"prompts.source.path={path}", "prompts.limit=null", "responses=as_given",
        "responses.off_policy=null", f"run_root={work / 'runs'}", f"run=[{','.join(STAGES)}]", *settings],
        choices)
    if problems := check(configuration, choices.groups(), pipeline.Stage):
        raise UserError("; ".join(problems))
    for name in STAGES:
        [there] = [each.state == "reuse" for each in pipeline.plan(configuration.settings)
                   if each.name == name]
        start = time.perf_counter()
        pipeline.run({**configuration.settings, "run": [name]})
        seconds[name] = None if there else time.perf_counter() - start
    return {each.name: each.folder for each in pipeline.plan(configuration.settings)}


def packed(folder: Path, tokens: int, seconds: dict[str, float | None]) -> dict[str, Any]:
    """What training would have: its samples in memory, and the rows of one epoch."""
    start = time.perf_counter()
    lengths = [len(sample.tokens) for sample in read_samples(folder, "train")]
    seconds["read"], start = time.perf_counter() - start, time.perf_counter()
    if max(lengths) > tokens:
        raise UserError(f"a row has {max(lengths)} tokens, and packed rows {tokens}; say --tokens "
                        f"{max(lengths)} or more")
    rows = plan_epoch(lengths, tokens, seed=0, epoch=0)
    seconds["pack"] = time.perf_counter() - start
    return {"samples": len(lengths), "tokens": sum(lengths), "packed_rows": len(rows), "row_tokens": tokens,
            "padding": round(padding(rows, lengths, tokens), 4)}


def resident() -> float:
    """The highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS")
    parser.add_argument("--conversations", type=int, default=100_000, metavar="N")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="kept, and gone on with; else a new one")
    parser.add_argument("--tokens", type=int, default=2048, help="of a packed row (2048)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, as of a run")
    options = parser.parse_intermixed_args()
    before, seconds = resident(), dict[str, float | None]()
    found = questions(options.prompts)
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-data-")))
        work.mkdir(parents=True, exist_ok=True)
        path, start = work / f"conversations-{options.conversations}.jsonl", time.perf_counter()
        write(path, found, options.conversations)
        made, start = time.perf_counter() - start, time.perf_counter()
        folders = run(path, work, options.settings, seconds)
        rows = packed(folders["responses"], options.tokens, seconds)
        data = json.loads((folders["responses"] / JSON).read_text(encoding="utf-8"))
        whole = None if None in seconds.values() else time.perf_counter() - start
        left_out: Counter[str] = Counter({each["why"]: each["count"] for each in data["left_out"]})
        print(json.dumps({
            "conversations": options.conversations, "made_seconds": round(made, 2),
            "seconds": {name: value and round(value, 2) for name, value in seconds.items()},
            "whole_seconds": whole and round(whole, 2),
            "conversations_per_second": whole and round(options.conversations / whole, 1),
            "peak_rss_mib": round(resident()), "rss_before_mib": round(before),
            "left_out": dict(left_out), "supervised_share": round(data["supervised_share"], 4), **rows}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
