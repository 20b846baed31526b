"""Checks of the built-in prompt set: its format, its mix, and that nothing held out was seen in training.

Assumes the file in trainer/data of this checkout. Whether a prompt reads well is for people to judge; these
tests only see counts, fields and shared word sequences.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from trainer._paths import find
from trainer._stage_record import fingerprint
from trainer.compose import compose_configuration
from trainer.data.duplicates import Duplicates
from trainer.data.prompts import Builtin
from trainer.pipeline import plan

PROMPTS = Path(__file__).resolve().parents[2] / "trainer" / "data" / "builtin_prompts.jsonl"
SHARES = {"chat": 0.40, "math": 0.22, "code": 0.18, "tools": 0.07, "multilingual": 0.13}
FIELDS = {"id", "category", "language", "split", "turns"}
HELD_OUT = 64
LONGEST = 700  # characters of one prompt with its system text; about 200 tokens


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def of_split(prompts: list[dict], split: str) -> list[dict]:
    return [prompt for prompt in prompts if prompt["split"] == split]


def text_of(prompt: dict, system: bool) -> str:
    return "\n".join(([prompt.get("system", "")] if system else []) + prompt["turns"])


def word_grams(text: str, length: int) -> set[tuple[str, ...]]:
    """Word sequences with every number written as 0: a template with other numbers counts as the same."""
    words = re.findall(r"[^\W_]+", re.sub(r"\d+(?:[.,:]\d+)*", "0", text.lower()))
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def jaccard(left: set, right: set) -> float:
    return len(left & right) / len(left | right)


def closest(held_out: list[dict], train: list[dict], length: int, system: bool) -> tuple[float, str, str]:
    seen = [(word_grams(text_of(prompt, system), length), prompt["id"]) for prompt in train]
    scores = []
    for prompt in held_out:
        grams = word_grams(text_of(prompt, system), length)
        scores += [(jaccard(grams, other), prompt["id"], name) for other, name in seen]
    return max(scores)


def test_counts(prompts: list[dict]) -> None:
    splits = Counter(prompt["split"] for prompt in prompts)
    assert set(splits) == {"train", "heldout"}
    assert splits["heldout"] == HELD_OUT
    assert splits["train"] >= 1300


def test_fields(prompts: list[dict]) -> None:
    for prompt in prompts:
        assert FIELDS <= set(prompt) <= FIELDS | {"system"}, prompt["id"]
        assert re.fullmatch(rf"{prompt['category']}-\d{{3}}", prompt["id"])
        texts = [*prompt["turns"], *([prompt["system"]] if "system" in prompt else [])]
        assert 1 <= len(prompt["turns"]) <= 2, prompt["id"]
        for text in texts:
            assert isinstance(text, str) and text and text == text.strip(), prompt["id"]
            assert text == unicodedata.normalize("NFC", text), prompt["id"]
            unfilled = re.search(r"\{[a-z]?\}", text.replace('"parameters": {}', ""))
            assert not unfilled, prompt["id"]
        assert sum(map(len, texts)) <= LONGEST, prompt["id"]


def test_ids_and_texts_are_unique(prompts: list[dict]) -> None:
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    texts = Counter(re.sub(r"\W+", " ", text_of(prompt, system=True).lower()) for prompt in prompts)
    assert [text for text, count in texts.items() if count > 1] == []


def test_mix_of_categories(prompts: list[dict]) -> None:
    counts = Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == set(SHARES)
    for category, share in SHARES.items():
        assert counts[category] / len(prompts) == pytest.approx(share, abs=0.02), category


def test_languages(prompts: list[dict]) -> None:
    for prompt in prompts:
        expected = {"es", "fr"} if prompt["category"] == "multilingual" else {"en"}
        assert prompt["language"] in expected, prompt["id"]
    counts = Counter(prompt["language"] for prompt in prompts)
    assert min(counts["es"], counts["fr"]) >= 80


def test_held_out_is_balanced(prompts: list[dict]) -> None:
    counts = Counter(prompt["category"] for prompt in of_split(prompts, "heldout"))
    assert set(counts) == set(SHARES)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {"es", "fr"} < {prompt["language"] for prompt in of_split(prompts, "heldout")}


def test_a_prefix_is_a_fair_sample(prompts: list[dict]) -> None:
    """A short run reads the first prompts of a split; it must still see every category."""
    assert {prompt["category"] for prompt in of_split(prompts, "heldout")[:12]} == set(SHARES)
    counts = Counter(prompt["category"] for prompt in of_split(prompts, "train")[:200])
    for category, share in SHARES.items():
        assert counts[category] / 200 == pytest.approx(share, abs=0.03), category


def test_conversations_with_a_second_turn(prompts: list[dict]) -> None:
    assert sum(len(prompt["turns"]) == 2 for prompt in prompts) >= 40


def test_tools_are_valid_json_and_differ_between_the_splits(prompts: list[dict]) -> None:
    names: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for prompt in prompts:
        if prompt["category"] != "tools":
            continue
        starts = [match.start() for match in re.finditer(r'\{"name": "', prompt["system"])]
        tools = [json.JSONDecoder().raw_decode(prompt["system"], start)[0] for start in starts]
        assert 2 <= len(tools) <= 4, prompt["id"]
        assert all(isinstance(tool["parameters"], dict) for tool in tools), prompt["id"]
        names[prompt["split"]] |= {tool["name"] for tool in tools}
    assert names["train"] and names["heldout"]
    assert names["train"].isdisjoint(names["heldout"])


@pytest.mark.parametrize(("length", "system", "bound"), [(5, True, 0.5), (5, False, 0.3), (3, False, 0.35)])
def test_held_out_is_not_close_to_training(
    prompts: list[dict], length: int, system: bool, bound: float
) -> None:
    score, held_out, train = closest(of_split(prompts, "heldout"), of_split(prompts, "train"), length, system)
    assert score < bound, f"{held_out} is too close to {train}"


def test_the_comparison_sees_a_template_with_other_numbers(prompts: list[dict]) -> None:
    train = [prompt for prompt in of_split(prompts, "train") if re.search(r"\d", prompt["turns"][0])]
    for prompt in train[:20]:
        copy = {**prompt, "turns": [re.sub(r"\d+", "731", turn) for turn in prompt["turns"]]}
        assert closest([copy], train, 5, system=True)[0] > 0.5, prompt["id"]


@pytest.mark.parametrize(("recipe", "limit", "heldout"), [("dflash_smollm2", 600, 64), ("smoke", 120, 16),
                                                          ("eagle3_smollm2_full", None, 64)])
def test_what_recipes_made_of_them_is_found_again(tmp_path: Path, recipe: str, limit: int | None,
                                                  heldout: int) -> None:
    """Settings that came later change no fingerprint while they do nothing: answers and states are kept."""
    settings = compose_configuration([f"recipe={recipe}", f"run_root={tmp_path}", "run=[prompts]"],
                                     find()).settings
    [planned] = plan(settings)
    source = {"_target_": "trainer.data.prompts.Builtin"}
    first = {"_target_": "trainer.data.prompts.Prompts", "source": source, "limit": limit,
             "heldout": heldout}
    assert planned.fingerprint == fingerprint(first, 1, {"source": Builtin().fingerprint()}, {})


def test_none_of_them_is_near_to_a_held_out_one() -> None:
    rows = Builtin().all_rows()
    train, heldout = ([prompt for prompt, name in rows if name == part] for part in ("train", "heldout"))
    _, dropped = Duplicates(0.8).without(train, heldout)
    assert {each.why for each in dropped} <= {"near a training text"}
