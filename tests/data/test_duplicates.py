"""Near duplicates: what counts as near, compared with the definition, and what stays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import duplicates
from trainer.data.duplicates import WIDTH, Duplicates, jaccard
from trainer.data.splits import Dropped
from trainer.records import Prompt

STORY = ("A train leaves the station at nine in the morning and reaches the next town, which is {} "
         "kilometres away, after two hours. How fast does it go on average, and when does it come back?")


def prompts(*texts: str, system: str | None = None, start: str = "p") -> list[Prompt]:
    return [Prompt(f"{start}{number}", (text,), system) for number, text in enumerate(texts)]


def kept(train: Sequence[Prompt], heldout: Sequence[Prompt] = (), similarity: float = 0.8) -> list[str]:
    return [prompt.id for prompt in Duplicates(similarity).without(train, heldout)[0]]


def plain_jaccard(one: str, other: str) -> float:
    """The definition, without hashes, for small letters and single blanks."""
    first, second = ({text[start:start + WIDTH] for start in range(max(1, len(text) - WIDTH + 1))}
                     for text in (one, other))
    return len(first & second) / len(first | second)


def test_the_same_question_with_another_number_is_near() -> None:
    train = prompts(STORY.format(120), "Something else entirely.", STORY.format(250))
    found, dropped = Duplicates(0.8).without(train, ())
    assert [prompt.id for prompt in found] == ["p0", "p1"]
    assert dropped == [Dropped("p2", "near a training text", "p0")]


def test_what_is_near_to_a_held_out_prompt_is_not_trained_on() -> None:
    held = prompts(STORY.format(7), STORY.format(8), start="h")
    train = prompts("Something else entirely.", STORY.format(9), "something  ELSE entirely.")
    found, dropped = Duplicates(0.8).without(train, held)
    assert [prompt.id for prompt in found] == ["p0"]
    assert dropped == [Dropped("p1", "near a held-out text", "h0"),
                       Dropped("p2", "near a training text", "p0")]


def test_repeated_texts_are_told_from_near_ones() -> None:
    train = prompts("one question here", "one question here", "another one there")
    assert Duplicates(1.0).without(train, ())[1] == [Dropped("p1", "repeats a training text", "p0")]


def test_the_system_text_must_be_near_too() -> None:
    """A long one that all share makes no two questions near."""
    rules = "You answer for a shop. " + " ".join(f"Rule {number} is to be kind." for number in range(60))
    assert len(kept(prompts("Where is my order?", "I want my money back.", system=rules))) == 2
    other = Prompt("q", (STORY.format(1),), "Antworte auf Deutsch, bitte.")
    assert kept([*prompts(STORY.format(1), system=rules), other]) == ["p0", "q"]


def test_work_does_not_grow_as_the_square_of_texts_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one family, half of which is their own: candidates of each other, and not near."""
    draw, compared = random.Random(5), Counter[str]()
    shared = "".join(draw.choice("abcdefghijklmnop") for _ in range(200))
    texts = [shared + "".join(draw.choice("qrstuvwxyz") for _ in range(120)) for _ in range(300)]
    one, other = (plain_jaccard(texts[number], texts[number + 1]) for number in (0, 1))
    assert 0.4 < one < 0.6 and 0.4 < other < 0.6
    exact = Duplicates._are_near

    def counted(self: Duplicates, one: Prompt, other: Prompt) -> bool:
        compared["pairs"] += 1
        return exact(self, one, other)

    monkeypatch.setattr(Duplicates, "_are_near", counted)
    assert len(kept(prompts(*texts))) == 300 and compared["pairs"] < 300, "signatures tell them apart"
    near = texts[7][:-3] + "abc"
    assert kept(prompts(*texts, near)) == [f"p{number}" for number in range(300)]


def test_of_a_crowd_the_first_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found where they share a smaller group."""
    draw = random.Random(6)
    shared = "".join(draw.choice("abcdefghijklmnop") for _ in range(200))
    texts = [shared + "".join(draw.choice("qrstuvwxyz") for _ in range(120)) for _ in range(60)]
    again = [text[:-2] + "ab" for text in texts]
    monkeypatch.setattr(duplicates, "CROWD", 4)
    found = kept(prompts(*texts, *again))
    assert {f"p{number}" for number in range(60)} <= {*found}
    assert len(found) < 60 + 20, "most are found, however small a crowd is"


def test_short_texts_are_near_only_when_equal() -> None:
    assert kept(prompts("x?", "xx?", "", "y?", "X?")) == ["p0", "p1", "p2", "p3"]


def test_nearly_all_pairs_at_the_bound_are_found() -> None:
    """Random texts, of which a part is written anew: what the definition calls near goes, all else stays."""
    draw = random.Random(3)
    missed = wrong = near = 0
    for similarity in (0.5, 0.7, 0.8, 0.95):
        for _ in range(60):
            one = "".join(draw.choice("abcdefghijklmnopqrst") for _ in range(300))
            cut = draw.randrange(250, 300) if similarity > 0.6 else draw.randrange(150, 260)
            other = one[:cut] + "".join(draw.choice("uvwxyz") for _ in range(300 - cut))
            expected = plain_jaccard(one, other) >= similarity
            found = len(kept(prompts(one, other), similarity=similarity)) == 1
            near, missed, wrong = near + expected, missed + (expected and not found), \
                wrong + (found and not expected)
    assert near > 60 and wrong == 0 and missed <= 0.03 * near


texts = st.text("abc ", min_size=1, max_size=14)


@given(st.lists(texts, min_size=1, max_size=8), st.lists(texts, max_size=4))
def test_nothing_that_stays_is_near_and_nothing_else_goes(train: list[str], held: list[str]) -> None:
    own, given_ = prompts(*train), prompts(*held, start="h")
    found, dropped = Duplicates(0.8).without(own, given_)
    assert [prompt for prompt in own if prompt in found] == found
    assert len(found) + len(dropped) == len(own)
    by_id = {prompt.id: prompt.turns[0] for prompt in [*own, *given_]}
    assert all(jaccard(by_id[each.id], by_id[each.of]) >= 0.8 for each in dropped)
    stay = {*(prompt.id for prompt in found), *(prompt.id for prompt in given_)}
    assert all(each.of in stay for each in dropped if each.why.startswith("near"))


@given(texts, texts)
def test_similarity_is_that_of_the_definition(one: str, other: str) -> None:
    plain = [" ".join(text.split()).ljust(WIDTH, "\0") for text in (one, other)]
    assert jaccard(one, other) == plain_jaccard(*plain)
