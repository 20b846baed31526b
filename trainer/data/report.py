"""What the training data is, for people: `data.json`, and `data.html`, one page that loads nothing.

Written by the stage that has the answers, from its own rows and from what the stage of the prompts left
beside its own: what was kept and left out and why, lengths, the supervised share, categories and languages,
and rows as they will be learnt from. Nothing in it is computed otherwise elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich import print as rich_print
from rich.table import Table
from rich.text import Text

from trainer.data.chat import coloured, spans
from trainer.data.packing import padding, plan_epoch
from trainer.data.prompts import FACTS
from trainer.data.response_rows import Row, mask_of
from trainer.data.tally import TAGS, Tally
from trainer.page import environment, moment
from trainer.target import Target

JSON, PAGE = "data.json", "data.html"
EXAMPLES = 10  # of what was left out, for each reason
QUANTILES = {"least": 0, "a tenth": 10, "half": 50, "nine tenths": 90, "most": 100}
TOLD = ("off_policy", "calls", "sampling")  # by some of the stages that answer; None by the others
PACKED = 4  # lengths of packed rows for which the padding is told: the shortest power of two, and doubled


def write(out: Path, prompts: Path | None, tally: Tally, dropped: Mapping[str, Sequence[str]],
          target: Target, **more: Any) -> None:
    """Both files, and what matters of them on the console. `prompts` is the folder of the stage before, if
    there was one; `dropped` what this stage left out, ids by reason; `more` what it alone has to tell."""
    found = gather(prompts, tally, dropped, target) | dict.fromkeys(TOLD) | more
    (out / JSON).write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    page = environment(Path(__file__).parent).get_template("data.html.jinja").render(
        data=found, created=moment(datetime.now()))
    (out / PAGE).write_text(page, encoding="utf-8")
    _show(found, tally.shown(), target)


def gather(prompts: Path | None, tally: Tally, dropped: Mapping[str, Sequence[str]],
           target: Target) -> dict[str, Any]:
    """The content of `data.json`."""
    tokens, supervised = tally.tokens, tally.supervised
    shares = [100 * part / whole for part, whole in zip(supervised, tokens, strict=True)]
    left_out = [_reason(why, ids) for why, ids in dropped.items() if ids]
    facts = _facts_of(prompts)
    return {
        "format": 1,
        "target": target.name,
        "template": target.template,
        "prompts": facts and {name: facts[name] for name in ("read", "kept", "train", "heldout", "repeated")},
        "languages": facts and facts.get("languages"),
        "thinking": facts and facts.get("thinking"),
        "left_out": (facts["left_out"] if facts else []) + left_out,
        "rows": tally.rows,
        "tokens": sum(tokens),
        "supervised": sum(supervised),
        "supervised_share": sum(supervised) / max(1, sum(tokens)),
        "cut": tally.cut.count,
        "lengths": {
            "tokens of a row": _quantiles(tokens),
            "supervised tokens": _quantiles(supervised),
            "supervised, in %": _quantiles(shares),
        },
        "histogram": _histogram(tokens),
        "packing": packing(tally.train),
        "tags": {tag: tally.by_tag(tag) for tag in TAGS},
        "samples": [_sample(row, target) for row in tally.shown()],
    }


def packing(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """What an epoch of rows of these lengths would be at several settings of train.tokens: how many packed
    rows, and the share of them that is padding."""
    shortest = 1 << (max(lengths, default=1) - 1).bit_length()
    plans = {shortest << more: plan_epoch(lengths, shortest << more, seed=0, epoch=0)
             for more in range(PACKED)} if lengths else {}
    return [{"tokens": tokens, "rows": len(rows), "padding": padding(rows, lengths, tokens)}
            for tokens, rows in plans.items()]


def _facts_of(prompts: Path | None) -> dict[str, Any] | None:
    """What the stage of the prompts read and left out; None where it did not say."""
    if prompts is None or not (prompts / FACTS).is_file():
        return None
    facts = json.loads((prompts / FACTS).read_text(encoding="utf-8"))
    reasons: dict[str, list[str]] = {}
    for each in facts["dropped"]:
        reasons.setdefault(each["why"], []).append(f"{each['id']} = {each['of']}")
    unused = facts["read"] - facts["kept"] - len(facts["bad"]) - len(facts["dropped"])
    found = [_reason("is no conversation", facts["bad"]), *(_reason(*each) for each in reasons.items()),
             {"why": "not asked for (prompts.limit, prompts.heldout)", "count": unused, "examples": []}]
    return {**facts, "left_out": [each for each in found if each["count"]]}


def _reason(why: str, examples: Sequence[str]) -> dict[str, Any]:
    return {"why": why, "count": len(examples), "examples": list(examples[:EXAMPLES])}


def _quantiles(values: Sequence[float]) -> dict[str, int]:
    """Values that were found, so that a length is one of a row."""
    found = np.percentile(values, [*QUANTILES.values()], method="nearest") if values else [0] * len(QUANTILES)
    return {name: round(float(value)) for name, value in zip(QUANTILES, found, strict=True)}


def _histogram(tokens: Iterable[int]) -> list[dict[str, int]]:
    """How many rows have at most so many tokens, and more than half of it."""
    counts = Counter(max(1, length - 1).bit_length() for length in tokens)
    return [{"up_to": 1 << power, "rows": counts[power]}
            for power in range(min(counts, default=0), max(counts, default=-1) + 1)]


def _sample(row: Row, target: Target) -> dict[str, Any]:
    ids, mask = row["prompt"] + row["tokens"], mask_of(row)
    parts = [{"text": target.tokenizer.decode(ids[start:end], skip_special_tokens=False),
              "supervised": mask[start]} for start, end in spans(mask)]
    return {"id": row["id"], "split": row["split"], **{tag: row.get(tag, "not said") for tag in TAGS},
            "tokens": len(mask), "supervised": sum(mask), "parts": parts}


def _show(found: dict[str, Any], rows: Sequence[Row], target: Target) -> None:
    for row in rows:
        learnt = coloured(target.tokenizer, row["prompt"] + row["tokens"], mask_of(row))
        head = (f"{row['id']}, supervised tokens in ", "dim")
        rich_print(Text.assemble(head, ("green", "bold green"), ":\n", learnt))
    table = Table("", "rows", "held out", "tokens", "supervised", box=None, padding=(0, 2))
    for tag in TAGS:
        for each in found["tags"][tag]:
            table.add_row(Text(f"{tag} {each['name']}"), f"{each['rows']:,}", f"{each['heldout']:,}",
                          f"{each['tokens']:,}", f"{each['supervised_share']:.1%}")
    lengths = Table("", *QUANTILES, box=None, padding=(0, 2))
    for name, values in found["lengths"].items():
        lengths.add_row(name, *(f"{value:,}" for value in values.values()))
    packed = Table("train.tokens", *(f"{each['tokens']:,}" for each in found["packing"]), box=None,
                   padding=(0, 2))
    packed.add_row("rows an epoch", *(f"{each['rows']:,}" for each in found["packing"]))
    packed.add_row("padding", *(f"{each['padding']:.1%}" for each in found["packing"]))
    rich_print(table, lengths, packed)
    if sum((found["calls"] or {}).values()):
        print("calls: " + ", ".join(f"{name.replace('_', ' ')} in {count}"
                                    for name, count in found["calls"].items()) + " turns")
    for each in found["left_out"]:
        print(f"left out: {each['count']}, {each['why']}")
    print(f"all of it, with samples: {PAGE} beside the answers", flush=True)
