"""A mixture: the ratio of its parts, in all rows and in the first ones, and no row twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.base import PromptSource
from trainer.data.mixture import Mixture, Part
from trainer.data.prompt_rows import Row
from trainer.data.prompts import Jsonl
from trainer.errors import UserError
from trainer.records import Prompt


class Numbered(PromptSource):
    """`count` rows to train on, and one held out."""

    def __init__(self, count: int) -> None:
        self.count = count

    def rows(self, bad: list[str]) -> list[Row]:
        return [(Prompt(f"q{number}", (f"question {number}",)), "heldout" if number == self.count else None)
                for number in range(self.count + 1)]

    def fingerprint(self) -> str:
        return str(self.count)


def mixture(total: int | None = None, **parts: tuple[int, float]) -> Mixture:
    return Mixture({name: Part(Numbered(count), weight, None, None)
                    for name, (count, weight) in parts.items()}, total)


def taken(source: Mixture) -> list[str]:
    """The parts of the training rows, in order."""
    return [prompt.id.partition("/")[0] for prompt, name in source.all_rows() if name is None]


def test_the_scarcest_part_decides_and_the_mix_holds_from_the_start() -> None:
    found = taken(mixture(chat=(100, 3.0), code=(10, 1.0)))
    assert Counter(found) == {"chat": 30, "code": 10}
    assert all(Counter(found[:4 * quarter])["code"] == quarter for quarter in range(1, 11))


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 40), st.floats(0.2, 5.0)),
                       min_size=1), st.integers(1, 60))
def test_shares_are_those_of_the_weights(parts: dict[str, tuple[int, float]], total: int) -> None:
    whole = sum(weight for _, weight in parts.values())
    source = mixture(total, **parts)
    if any(count * whole / weight < total for count, weight in parts.values()):
        with pytest.raises(UserError, match=f"prompts.source.total={total} cannot be had: the part"):
            source.all_rows()
        return
    rows = source.all_rows()
    found = Counter(taken(source))
    assert sum(found.values()) == total
    assert all(abs(found[name] - total * weight / whole) <= 1 for name, (_, weight) in parts.items())
    assert len({prompt.id for prompt, _ in rows}) == len(rows)
    assert sum(name == "heldout" for _, name in rows) == len(parts), "what is held out comes on top"


def test_a_part_tags_its_rows_or_leaves_them_theirs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": ["a"], "category": "maths", "language": "fr"}) + "\nnothing\n")
    source = Jsonl(str(path))
    bad: list[str] = []
    own, new = Part(source, 1.0, None, None), Part(source, 1.0, "code", "de")
    rows = Mixture({"own": own, "new": new}, None).rows(bad)
    assert [(prompt.id, prompt.category, prompt.language) for prompt, _ in rows] == [
        ("own/row-1", "maths", "fr"), ("new/row-1", "code", "de")]
    assert len(bad) == 2 and all("line 2: not valid JSON" in what for what in bad)


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="prompts.source.parts names no part"):
        mixture().all_rows()
    with pytest.raises(UserError, match="a mixture cannot be had: the part b has 0 rows to train on"):
        mixture(a=(3, 1.0), b=(0, 1.0)).all_rows()


def test_its_fingerprint_is_that_of_its_parts() -> None:
    assert mixture(a=(3, 1.0)).fingerprint() == mixture(a=(3, 1.0)).fingerprint()
    assert mixture(a=(3, 1.0)).fingerprint() != mixture(a=(4, 1.0)).fingerprint()
