"""The page on the data, opened in a real browser as on a phone and on a desk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import DESK, PHONE

from trainer.data import report
from trainer.data.prompts import FACTS
from trainer.data.tally import SAMPLES, Tally
from trainer.target import Target

ODD = "a<b>&c-" + "x" * 70  # a name that no line can break
MARKUP = "<script>alert(1)</script> &amp; "
TEXTS = [MARKUP + "y" * 300, "¿Qué? 你好，世界。 שלום עולם. مرحبا", "  spaces\n\n\ttabs\n" * 40]
LANGUAGES = ("en", "zh-Hant-TW", "unknown")


def row(target: Target, number: int, text: str) -> dict[str, Any]:
    ids = [int(token) for token in target.tokenizer(text, add_special_tokens=False).input_ids]
    return {"id": f"{ODD}{number}#0", "split": "heldout" if number % 3 == 0 else "train",
            "category": ODD if number < 2 else f"kind {number}", "language": LANGUAGES[number % 3],
            "prompt": ids[:4], "tokens": ids[4:] * (1 + number % 4), "finish_reason": "stop"}


@pytest.fixture(scope="module")
def page(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows with names and texts as awkward as they may be, with something left out for every reason."""
    folder = tmp_path_factory.mktemp("data")
    why = ["repeats a training text", "near a training text", "near a held-out text"]
    dropped = [{"id": f"{ODD}{number}", "why": why[number % 3], "of": f"{ODD}0"} for number in range(9)]
    facts = {"read": 123_456, "kept": 100_000, "train": 99_000, "heldout": 1_000, "repeated": 12,
             "bad": [f"/a/folder/{ODD}/prompts.jsonl, line {number}: not valid JSON" for number in range(12)],
             "dropped": dropped}
    (folder / FACTS).write_text(json.dumps(facts))
    rows = [row(tiny_target, number, TEXTS[number % len(TEXTS)]) for number in range(12)]
    score = {"rows": 12, "tokens": 99_000, "mean_log_likelihood": -1.5, "perplexity": 4.48, "warn_above": 3.0,
             "rows_above": 7, "worst": [{"id": f"{ODD}{number}", "perplexity": 1e30} for number in range(5)]}
    report.write(folder, folder, Tally.of(rows), {"longer than target.max_length": [ODD, "short"]},
                 tiny_target, off_policy=score,
                 calls={"own": 1, "other_arguments": 123_456, "recorded": 3, "dropped": 4})
    return folder / report.PAGE


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (PHONE, True), (DESK, False)])
def test_the_page_is_whole_and_readable(chromium: browser.Browser, page: Path, width: int,
                                        dark: bool) -> None:
    browser.require_readable(chromium, page, width, dark)
    assert chromium.do("document.querySelectorAll('script').length") == 0, "a text is no part of the page"
    assert chromium.do("document.querySelectorAll('section').length") == 8
    samples = chromium.do("[...document.querySelectorAll('pre.row')].map(each => each.textContent)")
    assert len(samples) == SAMPLES and any(MARKUP in text for text in samples)
    seen = chromium.do("""[...document.querySelectorAll('pre.row')].map(each =>
        [each.clientHeight, each.scrollWidth - each.clientWidth])""")
    assert all(height <= 420 and beyond <= 0 for height, beyond in seen), "long rows scroll, wide ones break"


def test_supervised_tokens_differ_from_others_to_the_eye(chromium: browser.Browser, page: Path) -> None:
    for dark in (False, True):
        chromium.open(page, DESK, dark)
        colours = chromium.do("""[...document.querySelectorAll('pre.row')].map(each => {
            const said = each.querySelector('.good');
            return [getComputedStyle(each).color, getComputedStyle(said).color]; })""")
        assert len(colours) == SAMPLES and all(given != learnt for given, learnt in colours)
