"""A mix of traffic: what is weighed, what is accepted of it, and what weights cannot ask for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.slices import Slices
from trainer.errors import UserError
from trainer.evaluate.decode import Counts
from trainer.evaluate.mix import lengths, mixed, require_slices, weight, weights_problems


def place(category: str, language: str = "en", turn: str = "first") -> Slices:
    return {"category": category, "language": language, "thinking": "unknown", "context": "up_to_128",
            "turn": turn}


def counts(drafts: int, accepted: int) -> Counts:
    return Counts(drafts, 3 * drafts, accepted, [accepted, 0, 0])


PARTS = [(place("chat"), counts(60, 12)), (place("chat", "es"), counts(40, 8)),
         (place("code"), counts(10, 10)), (place("code"), counts(10, 10)),
         (place("math", turn="second"), counts(5, 0))]
LENGTHS = {"chat": 1.2, "code": 2.0, "math": 1.0}


def test_lengths_of_slices_are_those_of_their_sums() -> None:
    assert lengths(PARTS, ["category", "language", "turn"]) == pytest.approx(
        LENGTHS | {"language=en": 1 + 32 / 85, "language=es": 1.2, "turn=first": 1 + 40 / 120,
                   "turn=second": 1.0})
    assert lengths(PARTS, []) == {}


def test_a_mix_counts_the_steps_of_each_share() -> None:
    """Three tokens of code in two at a step, one of chat in 1.2: 4 tokens in 1.5 + 0.83 steps."""
    assert mixed({"category": {"code": 3, "chat": 1}}, PARTS) == pytest.approx(4 / (3 / 2.0 + 1 / 1.2))
    assert mixed({"category": {"code": 30, "chat": 10, "math": 0}}, PARTS) == pytest.approx(
        4 / (3 / 2.0 + 1 / 1.2)), "shares alone count, and a weight of 0 is none"
    assert mixed({"category": {"code": 1}}, PARTS) == 2.0
    assert mixed({}, PARTS) is None


def test_weights_of_several_kinds_multiply() -> None:
    weights = {"category": {"code": 3, "chat": 1}, "language": {"en": 2, "es": 1}}
    assert weight(weights, place("code")) == 6 and weight(weights, place("chat", "es")) == 1
    assert weight(weights, place("math")) == weight(weights, place("code", "fr")) == 0
    assert mixed(weights, PARTS) == pytest.approx(9 / (6 / 2.0 + 2 / 1.2 + 1 / 1.2))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 99), st.integers(0, 200)), min_size=1))
def test_weights_like_the_tokens_give_what_all_prompts_give(parts: list[tuple[str, int, int]]) -> None:
    """The traffic that was measured is a mix like any other."""
    made = [(place(name), counts(drafts, accepted)) for name, drafts, accepted in parts]
    tokens: dict[str, float] = {}
    for name, drafts, accepted in parts:
        tokens[name] = tokens.get(name, 0) + drafts + accepted
    whole = Counts()
    for _, each in made:
        whole.add(each)
    assert mixed({"category": tokens}, made) == pytest.approx(whole.accepted_length)


@pytest.mark.parametrize(("weights", "expected"), [
    ({}, {}), ({"category": {"code": 3}}, {}),
    ({"categry": {"code": 3}}, {"weights.categry": "is no kind of slice; nearest: category; kinds: category, "
                                                   "language, thinking, context, turn"}),
    ({"turn": {"first": 0}}, {"weights.turn": "gives no slice a weight above 0, so nothing would count"}),
    ({"turn": {}}, {"weights.turn": "gives no slice a weight above 0, so nothing would count"})])
def test_weights_are_judged_by_themselves(weights: dict[str, Any], expected: dict[str, str]) -> None:
    assert weights_problems(weights) == expected


def required(weights: dict[str, Any], chosen: list[Slices], all_of: list[Slices]) -> None:
    require_slices(weights, "train.acceptance.weights", chosen, all_of, "train.acceptance.prompts")


def test_a_slice_that_is_not_there_is_one_error() -> None:
    there = [place("chat"), place("code"), place("math", "es")]
    required({"category": {"chat": 1, "cod": 0}, "language": {"es": 2, "en": 1}}, there, there)
    with pytest.raises(UserError, match=r"^train\.acceptance\.weights weighs the category 'cod', but no held-"
                                        r"out answer is of it; nearest: code \(there: chat, code, math\); "
                                        r"name one that is there, or hold out prompts of it"):
        required({"category": {"chat": 1, "cod": 2}}, there, there)
    with pytest.raises(UserError, match=r"weighs the language 'es', but none of the 2 answers that are "
                                        r"measured is of it; raise train\.acceptance\.prompts"):
        required({"language": {"es": 1}}, there[:2], there)
    with pytest.raises(UserError, match=r"\(there: none at all\)"):
        required({"language": {"es": 1}}, [], [])


def test_weights_that_leave_nothing_together_are_told() -> None:
    there = [place("chat"), place("code", "es")]
    with pytest.raises(UserError, match="no weight to any of the 2 answers .* of category and language that"):
        required({"category": {"chat": 1}, "language": {"es": 1}}, there, there)
