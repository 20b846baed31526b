"""In which slices conversations and rows of training data lie."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_responses

from trainer.data.response_rows import read_samples
from trainer.data.slices import (
    BOUNDS,
    BUCKETS,
    KINDS,
    differing,
    label,
    of_prompt,
    of_sample,
    ordered,
    parsed,
    rank,
    thinking,
)
from trainer.records import UNKNOWN, Prompt, Sample


def sample(name: str, before: int, **tags: str) -> Sample:
    return Sample(name, (1,) * (before + 2), (False,) * before + (True,) * 2, **tags)


def test_a_row_lies_in_a_slice_of_each_kind() -> None:
    assert of_sample(sample("a#0", 10)) == {"category": "chat", "language": UNKNOWN, "thinking": UNKNOWN,
                                            "context": "up_to_128", "turn": "first"}
    assert of_sample(sample("x#y#2", 600, category="code", language="fr", thinking="on")) == {
        "category": "code", "language": "fr", "thinking": "on", "context": "up_to_2048", "turn": "third"}
    assert [of_sample(sample(name, 1))["turn"] for name in ("7", "a#1", "a~2#4", "a#b")] == [
        "first", "second", "later", "first"]


def test_the_tags_of_a_row_are_read_where_they_are_said(tmp_path: Path) -> None:
    given = [sample("a#0", 3, language="es", thinking="off"), sample("b#1", 3)]
    folder = write_responses(tmp_path, given)
    assert read_samples(folder, "train") == given
    path = folder / "responses.jsonl"
    path.write_text(path.read_text().replace('"language": "es", "thinking": "off", ', ""))
    [plain, _] = read_samples(folder, "train")
    assert (plain.language, plain.thinking) == (UNKNOWN, UNKNOWN), "rows that were made without"


@pytest.mark.parametrize(("template", "mode"), [
    ({}, UNKNOWN), ({"enable_thinking": True}, "on"), ({"enable_thinking": False}, "off"),
    ({"thinking": False}, "off"), ({"reasoning_effort": "high"}, "high"), ({"tools": []}, UNKNOWN),
    ({"enable_thinking": False, "reasoning_effort": "high"}, "off"), ({"thinking": "abc"}, UNKNOWN)])
def test_the_thinking_mode_is_what_the_template_is_told(template: dict, mode: str) -> None:
    assert thinking(template) == mode


def test_a_prompt_s_own_mode_comes_before_the_target_s() -> None:
    asked = Prompt("p", ("a",), category="math", language="de", template={"enable_thinking": True})
    assert of_prompt(asked, {"enable_thinking": False}, 1, 513) == {
        "category": "math", "language": "de", "thinking": "on", "context": "up_to_2048", "turn": "second"}
    assert of_prompt(Prompt("p", ("a",)), {"enable_thinking": False}, 0, 512)["thinking"] == "off"


@given(st.integers(0, 400_000))
def test_every_length_has_the_smallest_bucket_that_holds_it(tokens: int) -> None:
    bucket = of_prompt(Prompt("p", ("a",)), {}, 0, tokens)["context"]
    place = BUCKETS.index(bucket)
    lower, upper = [*pairwise([-1, *BOUNDS, 1 << 60])][place]
    assert lower < tokens <= upper


def test_names_are_ordered_as_people_read_them() -> None:
    assert ordered("context", ["over_131072", "up_to_512", "up_to_128", "up_to_2048"]) == [
        "up_to_128", "up_to_512", "up_to_2048", "over_131072"]
    assert ordered("turn", ["later", "first", "second"]) == ["first", "second", "later"]
    assert ordered("language", ["fr", "en", "fr"]) == ["en", "fr"]
    names = ["chat", "math", "language=de", "thinking=on", "context=up_to_512", "context=up_to_2048",
             "turn=first", "turn=later"]
    assert sorted([*names[3:], *names[:3]], key=rank) == names


@given(st.sampled_from(KINDS), st.text(st.characters(exclude_characters="="), max_size=9))
def test_a_name_says_kind_and_slice(kind: str, name: str) -> None:
    assert parsed(label(kind, name)) == (kind, name)


def test_kinds_that_tell_nothing_apart_are_left_out() -> None:
    found = [of_sample(sample("a#0", 5)), of_sample(sample("b#1", 200))]
    assert differing(found) == ["context", "turn"] and differing(found[:1]) == differing([]) == []
