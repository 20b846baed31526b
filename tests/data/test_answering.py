"""Answers in any order, and runs that are killed at any of them: the file is that of an unbroken run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import engine

from trainer.data.answering import Answering
from trainer.engines.base import Group
from trainer.engines.transformers import TransformersEngine
from trainer.progress import Progress
from trainer.records import Completion, Sampling

SAMPLING = Sampling(8, 0.0, 1.0, 0)
SIZES = (3, 1, 4, 2)
NAME = "answers.jsonl"


class Shuffled(TransformersEngine):
    """Answers each prompt with what depends on it alone, in an order that `seed` decides, all groups at once
    if it does so `apart`; after `lasts` answers somebody presses a key."""

    seed, lasts = 0, 1_000
    apart = True

    def completions(self, groups: Iterable[Group], sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        self.asked: list[str] = []
        order = random.Random(self.seed)
        for asked in [{key: prompt for group in groups for key, prompt in group.items()}] if self.apart \
                else groups:
            for key in order.sample([*asked], len(asked)):
                if len(self.asked) == self.lasts:
                    raise KeyboardInterrupt
                self.asked.append(key)
                yield key, Completion((len(asked[key]), sum(asked[key])), "stop")


class OneByOne(Shuffled):
    """Computes each group as one."""

    apart = False


class Watched(Progress):
    """Remembers what it was told."""

    def __enter__(self) -> Watched:
        self.told: list[int] = []
        super().__enter__()
        return self

    def advance(self, amount: int = 1, **numbers: Any) -> None:
        assert numbers["tokens/s"] > 0
        self.told.append(amount)
        super().advance(amount, **numbers)


def questions() -> list[list[dict[str, Any]]]:
    """Groups of several sizes; no two prompts are the same."""
    numbers = itertools.count()
    return [[{"id": f"p{number}", "split": "train", "category": "chat", "prompt": [number, 7]}
             for number in itertools.islice(numbers, size)] for size in SIZES]


def ask(folder: Path, kind: type[Shuffled] = Shuffled, seed: int = 0, lasts: int = 1_000,
        groups: list[list[dict[str, Any]]] | None = None) -> tuple[Answering, Watched]:
    folder.mkdir(exist_ok=True)
    answering = Answering(engine(kind=kind), folder / NAME)
    answering.engine.seed, answering.engine.lasts = seed, lasts
    with Watched("answers", total=sum(SIZES), unit="answers", start=answering.count) as bar:
        answering.ask(questions() if groups is None else groups, SAMPLING, bar)
    answering.finish()
    return answering, bar


def expected() -> list[bytes]:
    """The bytes of each group, one after the other."""
    found = []
    for group in questions():
        rows = [{**row, "tokens": [2, sum(row["prompt"])], "finish_reason": "stop"} for row in group]
        rows[-1]["last"] = True
        found.append("".join(json.dumps(row) + "\n" for row in rows).encode())
    return found


@pytest.mark.parametrize("kind", [Shuffled, OneByOne])
@pytest.mark.parametrize("seed", range(4))
def test_the_file_is_in_the_order_of_the_groups(tmp_path: Path, kind: type[Shuffled], seed: int) -> None:
    answering, bar = ask(tmp_path, kind, seed)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {NAME: b"".join(expected())}
    assert bar.told == [1] * sum(SIZES) and answering.count == sum(SIZES) == bar.done


@pytest.mark.parametrize("lasts", range(sum(SIZES)))
def test_a_killed_run_asks_for_the_others_alone(tmp_path: Path, lasts: int) -> None:
    """Killed after each number of answers, and once more while it goes on; a row may be torn."""
    everything = [row["id"] for group in questions() for row in group]
    kept: list[str] = []
    for torn in (b"", b'{"id": "p0", "spl'):
        with pytest.raises(KeyboardInterrupt):
            ask(tmp_path, seed=lasts, lasts=min(lasts, (sum(SIZES) - len(kept)) // 2))
        whole = (tmp_path / NAME).read_bytes() if (tmp_path / NAME).exists() else b""
        assert whole in [b"".join(expected()[:count]) for count in range(len(SIZES))], "whole ones, in order"
        again = Answering(engine(kind=Shuffled), tmp_path / NAME)
        kept = [*again.rows, *again.arrived.rows]
        assert again.count == len(kept) == len({*kept})
        if torn and again.arrived.rows:
            with again.arrived.path.open("ab") as file:
                file.write(torn)
    assert lasts == 0 or len(kept) > 1
    answering, bar = ask(tmp_path, seed=lasts + 1)
    assert sorted([*kept, *answering.engine.asked]) == sorted(everything), "nothing is asked for twice"
    assert bar.told == [1] * len(answering.engine.asked) and bar.done == sum(SIZES)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {NAME: b"".join(expected())}


def test_what_is_computed_as_one_is_computed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, OneByOne, lasts=6)
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "parts of a group are of no use"
    answering, bar = ask(tmp_path, OneByOne)
    assert len(answering.engine.asked) == sum(SIZES[2:]) and bar.done == sum(SIZES)
    assert (tmp_path / NAME).read_bytes() == b"".join(expected())


def test_an_engine_that_computes_groups_takes_nothing_of_one_that_does_not(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, lasts=7)
    assert (tmp_path / f"{NAME}.arrived").exists()
    answering, _ = ask(tmp_path, OneByOne)
    assert {path.name for path in tmp_path.iterdir()} == {NAME}
    assert (tmp_path / NAME).read_bytes() == b"".join(expected())


def test_an_answer_to_something_else_is_not_taken(tmp_path: Path) -> None:
    """The question of a later turn is another one once an earlier turn was answered anew."""
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, lasts=2, groups=questions()[2:])
    changed = questions()[2:]
    kept = Answering(engine(kind=Shuffled), tmp_path / NAME).arrived.rows
    assert len(kept) == 2
    for row in changed[0] + changed[1]:
        row["prompt"] = [*row["prompt"], 1]
    answering, _ = ask(tmp_path, groups=changed)
    assert len(answering.engine.asked) == sum(SIZES[2:])
    assert all(row["tokens"][0] == 3 for row in answering.rows.values())


def test_a_damaged_file_of_arrivals_counts_up_to_the_damage(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, seed=2, lasts=4, groups=questions()[2:])
    path = tmp_path / f"{NAME}.arrived"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0\0\0\n", *lines[2:]]))
    again = Answering(engine(kind=Shuffled), tmp_path / NAME)
    assert [*again.arrived.rows] == [json.loads(line)["id"] for line in lines[:2]]
    assert path.read_bytes() == b"".join(lines[:2])
