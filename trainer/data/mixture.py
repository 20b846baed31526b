"""A source of several others, by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer.data.base import PromptSource
from trainer.data.prompt_rows import Row
from trainer.errors import UserError
from trainer.ranges import Count, Positive


@dataclass(frozen=True)
class Part:
    """One source of a mixture. `category` and `language` are those of all its rows; null: the rows' own."""

    source: PromptSource
    weight: Positive
    category: str | None
    language: str | None


@dataclass(frozen=True)
class Mixture(PromptSource):
    """Rows of the `parts` in the ratio of their weights, `total` of them or as many as can be had. No row is
    taken twice: the part that is scarcest for its weight decides. The mix holds for the first rows as for
    all. Rows that a part holds out come on top."""

    parts: dict[str, Part]
    total: Count | None

    @property
    def quick(self) -> bool:
        return all(part.source.quick for part in self.parts.values())

    def rows(self, bad: list[str]) -> list[Row]:
        found = {name: _tagged(name, part, part.source.rows(bad)) for name, part in self.parts.items()}
        free = {name: [row for row in rows if row[1] != "heldout"] for name, rows in found.items()}
        taken = []
        for place, (name, count) in enumerate(self._counts(free).items()):
            rows = free[name]
            taken += [((number + 0.5) / count, place, rows[number * len(rows) // count])
                      for number in range(count)]
            print(f"prompts: {count} of the {len(rows)} rows of {name} are taken", flush=True)
        return [row for _, _, row in sorted(taken, key=lambda each: each[:2])] + [
            row for rows in found.values() for row in rows if row[1] == "heldout"]

    def fingerprint(self) -> str:
        facts = "".join(f"{name}\0{part.source.fingerprint()}\0" for name, part in self.parts.items())
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def _counts(self, free: Mapping[str, list[Row]]) -> dict[str, int]:
        """How many rows are taken of each part, by largest remainders."""
        if not self.parts:
            raise UserError("prompts.source.parts names no part; give each a source and a weight")
        whole = sum(part.weight for part in self.parts.values())
        room = {name: int(len(free[name]) * whole / part.weight) for name, part in self.parts.items()}
        scarce = min(room, key=lambda name: room[name])
        if not free[scarce] or (self.total or 0) > room[scarce]:
            asked = f"prompts.source.total={self.total}" if free[scarce] else "a mixture"
            raise UserError(f"{asked} cannot be had: the part {scarce} has {len(free[scarce])} rows to train "
                            f"on, which at its weight allows for {room[scarce]} in all; give it more, or "
                            "less weight")
        total = self.total or room[scarce]
        exact = {name: total * part.weight / whole for name, part in self.parts.items()}
        counts = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
        for name in by_remainder[:total - sum(counts.values())]:
            counts[name] += 1
        return counts


def _tagged(name: str, part: Part, rows: list[Row]) -> list[Row]:
    """Rows with ids of their own, and the tags of the part."""
    tags = {key: value for key, value in (("category", part.category), ("language", part.language)) if value}
    return [(replace(prompt, id=f"{name}/{prompt.id}", **tags), split) for prompt, split in rows]
