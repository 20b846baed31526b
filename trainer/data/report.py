"""What the training data is, for people: `data.json`, and `data.html`, one page that loads nothing.

Written by the stage that has the answers, from its own rows and from what the stage of the prompts left
beside its own: what was kept and left out and why, lengths, the supervised share, categories and languages,
and rows as they will be learnt from. Nothing in it is computed otherwise elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich import print as rich_print
from rich.table import Table
from rich.text import Text

from trainer.data.chat import coloured, spans
from trainer.data.prompts import FACTS
from trainer.data.response_rows import Row, mask_of
from trainer.data.splits import in_turn
from trainer.page import environment, moment
from trainer.target import Target

JSON, PAGE = "data.json", "data.html"
SAMPLES = 3
EXAMPLES = 10  # of what was left out, for each reason
QUANTILES = {"least": 0, "a tenth": 10, "half": 50, "nine tenths": 90, "most": 100}
TAGS = ("category", "language")


def write(out: Path, prompts: Path | None, rows: Sequence[Row], dropped: dict[str, Sequence[str]],
          target: Target) -> None:
    """Both files, and what matters of them on the console. `prompts` is the folder of the stage before, if
    there was one; `dropped` what this stage left out, ids by reason."""
    found = gather(prompts, rows, dropped, target)
    (out / JSON).write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    page = environment(Path(__file__).parent).get_template("data.html.jinja").render(
        data=found, created=moment(datetime.now()))
    (out / PAGE).write_text(page, encoding="utf-8")
    _show(found, rows, target)


def gather(prompts: Path | None, rows: Sequence[Row], dropped: dict[str, Sequence[str]],
           target: Target) -> dict[str, Any]:
    """The content of `data.json`."""
    masks = [mask_of(row) for row in rows]
    supervised, tokens = [sum(mask) for mask in masks], [len(mask) for mask in masks]
    shares = [100 * part / whole for part, whole in zip(supervised, tokens, strict=True)]
    left_out = [_reason(why, ids) for why, ids in dropped.items() if ids]
    facts = _facts_of(prompts)
    return {
        "format": 1,
        "target": target.name,
        "template": target.template,
        "prompts": facts and {name: facts[name] for name in ("read", "kept", "train", "heldout", "repeated")},
        "languages": facts and facts.get("languages"),
        "left_out": (facts["left_out"] if facts else []) + left_out,
        "rows": len(rows),
        "tokens": sum(tokens),
        "supervised": sum(supervised),
        "supervised_share": sum(supervised) / max(1, sum(tokens)),
        "cut": sum(row["finish_reason"] == "length" for row in rows),
        "lengths": {
            "tokens of a row": _quantiles(tokens),
            "supervised tokens": _quantiles(supervised),
            "supervised, in %": _quantiles(shares),
        },
        "histogram": _histogram(tokens),
        "tags": {tag: _by_tag(tag, rows, tokens, supervised) for tag in TAGS},
        "samples": [_sample(row, target) for row in chosen(rows)],
    }


def chosen(rows: Sequence[Row]) -> list[Row]:
    """The rows that are shown: of different categories, and with something to learn where there are some."""
    learnable = [row for row in rows if sum(mask_of(row)) > 1]
    return in_turn(learnable or rows, SAMPLES, lambda row: row["category"])


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


def _by_tag(tag: str, rows: Sequence[Row], tokens: Sequence[int],
            supervised: Sequence[int]) -> list[dict[str, Any]]:
    """Rows, tokens and supervised share by category or language; the most frequent first."""
    sums: dict[str, Counter[str]] = {}
    for row, whole, part in zip(rows, tokens, supervised, strict=True):
        sums.setdefault(row.get(tag, "not said"), Counter()).update(
            {row["split"]: 1, "rows": 1, "tokens": whole, "supervised": part})
    keys = ("rows", "train", "heldout", "tokens", "supervised")
    return [{"name": name, **{key: found[key] for key in keys},
             "supervised_share": found["supervised"] / max(1, found["tokens"])}
            for name, found in sorted(sums.items(), key=lambda each: (-each[1]["rows"], each[0]))]


def _sample(row: Row, target: Target) -> dict[str, Any]:
    ids, mask = row["prompt"] + row["tokens"], mask_of(row)
    parts = [{"text": target.tokenizer.decode(ids[start:end], skip_special_tokens=False),
              "supervised": mask[start]} for start, end in spans(mask)]
    return {"id": row["id"], "split": row["split"], **{tag: row.get(tag, "not said") for tag in TAGS},
            "tokens": len(mask), "supervised": sum(mask), "parts": parts}


def _show(found: dict[str, Any], rows: Sequence[Row], target: Target) -> None:
    for row in chosen(rows):
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
    rich_print(table, lengths)
    for each in found["left_out"]:
        print(f"left out: {each['count']}, {each['why']}")
    print(f"all of it, with samples: {PAGE} beside the answers", flush=True)
