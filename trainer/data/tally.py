"""What is counted of rows as they go by. No row is kept but the few that are shown, so that a million of them
need little memory: two numbers each."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

from trainer.data.response_rows import Row, mask_of
from trainer.data.splits import in_turn
from trainer.errors import UserError
from trainer.target import Target

SAMPLES = 3  # rows that are shown
NAMED = 20  # ids that a record names
TAGS = ("category", "language")


class Named:
    """How many there are, and the ids of the first."""

    def __init__(self) -> None:
        self.count, self.ids = 0, []

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.ids) < NAMED:
            self.ids.append(name)


class Tally:
    """`tokens` and `supervised` are those of each row, in order, `train` the tokens of those that are trained
    on; `cut` are the rows that ended at a limit, `empty` those whose answer is no more than its end."""

    def __init__(self) -> None:
        self.tokens, self.supervised, self.train = array("L"), array("L"), array("L")
        self.cut, self.empty = Named(), Named()
        self.splits: Counter[str] = Counter()
        self.tags: dict[str, dict[str, Counter[str]]] = {tag: {} for tag in TAGS}
        self._shown: dict[bool, dict[str, list[tuple[int, Row]]]] = {True: {}, False: {}}

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        found = cls()
        for row in rows:
            found.add(row)
        return found

    def add(self, row: Row) -> None:
        mask = mask_of(row)
        number, tokens, supervised = len(self.tokens), len(mask), sum(mask)
        self.tokens.append(tokens)
        self.supervised.append(supervised)
        if row["split"] == "train":
            self.train.append(tokens)
        ended = row["finish_reason"] != "length"
        if not ended:
            self.cut.add(row["id"])
        if supervised - ended <= 0:
            self.empty.add(row["id"])
        self.splits[row["split"]] += 1
        for tag, found in self.tags.items():
            found.setdefault(row.get(tag, "not said"), Counter()).update(
                {row["split"]: 1, "rows": 1, "tokens": tokens, "supervised": supervised})
        groups = self._shown[supervised > 1]
        if row["category"] in groups or len(groups) < SAMPLES:  # others are not reached in turn
            group = groups.setdefault(row["category"], [])
            if len(group) < SAMPLES:
                group.append((number, row))

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def shown(self) -> list[Row]:
        """Rows of different categories, and with something to learn where there are some."""
        groups = self._shown[True] or self._shown[False]
        found = sorted((each for group in groups.values() for each in group), key=lambda each: each[0])
        return in_turn([row for _, row in found], SAMPLES, lambda row: row["category"])

    def by_tag(self, tag: str) -> list[dict[str, Any]]:
        """Rows, tokens and supervised share by category or language; the most frequent first."""
        keys = ("rows", "train", "heldout", "tokens", "supervised")
        found = sorted(self.tags[tag].items(), key=lambda each: (-each[1]["rows"], each[0]))
        return [{"name": name, **{key: sums[key] for key in keys},
                 "supervised_share": sums["supervised"] / max(1, sums["tokens"])} for name, sums in found]


def describe(tally: Tally, target: Target, dropped: Sequence[str]) -> dict[str, Any]:
    """The numbers of the stage's record; prints the supervised share; refuses rows of which nothing can be
    learnt."""
    tokens, supervised = sum(tally.tokens), sum(tally.supervised)
    if not tally.splits["train"]:
        raise UserError(f"no training prompt is left: {len(dropped)} prompts are too long, and the rest is "
                        "held out; raise target.max_length, or give shorter prompts")
    if not supervised or tally.empty.count == tally.rows:
        raise UserError(f"of the {tokens} tokens in {tally.rows} rows {supervised} are supervised, and none "
                        "of them is more than the end of an answer: the template of "
                        f"{target.tokenizer.name_or_path} hides the answers, or the target gives none")
    remarks = {"reached the limit of tokens": tally.cut.count, "are empty": tally.empty.count,
               "were too long and left out": len(dropped)}
    print(f"supervised: {supervised} of {tokens} tokens ({supervised / tokens:.1%}) in {tally.rows} rows"
          + "".join(f"; {count} {what}" for what, count in remarks.items() if count))
    return {"rows": tally.rows, "tokens": tokens, "supervised": supervised,
            "supervised_share": round(supervised / tokens, 4),
            "cut": tally.cut.count, "cut_ids": tally.cut.ids,
            "empty": tally.empty.count, "empty_ids": tally.empty.ids,
            "dropped": len(dropped), "dropped_ids": [*dropped[:NAMED]],
            "splits": dict(tally.splits),
            "categories": {name: found["rows"] for name, found in tally.tags["category"].items()},
            "mean_answer_tokens": round(supervised / tally.rows, 1),
            "vocabulary": target.config["vocab_size"]}
