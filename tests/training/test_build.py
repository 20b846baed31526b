"""What is told of the drafter before training begins: its vocabulary, and a mask token that has a meaning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import copied, make_small, random_samples

from trainer.errors import UserError
from trainer.records import Sample
from trainer.target import Target
from trainer.target_made import CHATML
from trainer.training.build import (
    count_tokens,
    first_drafter,
    mark_facts,
    require_unused_mask,
    special_ids,
)


def test_the_coverage_is_told_and_recorded(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    counts = count_tokens(random_samples((200, 300)), 320)
    distinct = int((counts > 0).sum())
    assert tiny_target.folder and capsys.readouterr()  # the target is made, which is told, too
    _, facts = first_drafter(make_small("dflash", draft_vocab_size=100), tiny_target, counts)
    told = capsys.readouterr().out
    assert told.startswith("draft vocabulary: drafter.draft_vocab_size=100 of 320 tokens covers ")
    assert "note:" not in told
    covered = facts["draft_vocabulary"]["covered"]
    assert 0.4 < covered < 1 and f"covers {covered:.2%}" in told
    _, facts = first_drafter(make_small("dflash", draft_vocab_size=300), tiny_target, counts)
    assert facts["draft_vocabulary"] | {"curve": {}} == {
        "rows": 300, "total": 320, "covered": 1.0, "distinct": distinct, "special": 2, "curve": {},
        "by_category": {}}
    assert f"is more than the {distinct} distinct tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="draft_vocab_size=2 must lie between 3, as 2 special tokens are in"):
        first_drafter(make_small("dflash", draft_vocab_size=2), tiny_target, counts)
    _, facts = first_drafter(make_small("dflash", draft_vocab_size=3), tiny_target, counts)
    assert facts["draft_vocabulary"]["covered"] > 0, "a token that is seen is in the smallest"
    capsys.readouterr()
    assert first_drafter(make_small("dflash", draft_vocab_size=None), tiny_target, counts)[1] == {}
    assert capsys.readouterr().out == ""


def test_each_category_is_told(tiny_target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary of frequent tokens covers what is said often, and little of a rare kind of text."""
    counts = {name: torch.zeros(320, dtype=torch.int64) for name in ("chat", "code", "none")}
    counts["chat"][100:110] = 50
    counts["code"][105:115] = 1
    assert tiny_target.folder and capsys.readouterr()
    _, facts = first_drafter(make_small("dflash", draft_vocab_size=12), tiny_target,
                             counts["chat"] + counts["code"], counts)
    assert facts["draft_vocabulary"]["by_category"] == {"chat": 1.0, "code": 0.5}
    assert "\ndraft vocabulary by category: code 50.00%, chat 100.00%\n" in capsys.readouterr().out


def test_marks_that_the_template_writes_are_special(tiny_target: Target, tmp_path: Path) -> None:
    """They can be drafted though no answer had them: a thinking block, the call of a function."""
    plain = make_small("dflash", draft_vocab_size=100)
    assert len(special_ids(tiny_target)) == 2 and mark_facts(plain, tiny_target) == {}
    template = CHATML + "{% if false %}<|unused_3|>{{ '<|unused_1|>' }}{% endif %}"
    marked = copied(tiny_target, tmp_path / "marked")
    (marked.folder / "chat_template.jinja").write_text(template)
    marks = [marked.tokenizer.convert_tokens_to_ids(f"<|unused_{number}|>") for number in (1, 3)]
    assert special_ids(marked) == (*special_ids(tiny_target), *marks)
    assert mark_facts(plain, marked) == {"marks": marks}, "another vocabulary is another training"
    assert mark_facts(make_small("dflash", draft_vocab_size=None), marked) == {}
    counts = torch.zeros(320, dtype=torch.int64)
    counts[:100] = 1
    drafter, _ = first_drafter(plain, marked, counts)
    assert {*marks} <= {*drafter.vocabulary.ids.tolist()}


def test_a_mask_token_that_the_target_says_is_refused(tiny_target: Target) -> None:
    mask = tiny_target.mask_token_id
    asked = Sample("asked", (mask,) * 50 + (1, 2), (False,) * 50 + (True, True))
    often = Sample("often", (mask, 1, 3) * 11, (True,) * 33)
    require_unused_mask(tiny_target, [asked, replace(often, tokens=(mask, 1, 3) * 10 + (1, 1, 1))])
    long = Sample("long", (1,) * 11_000, (True,) * 11_000)
    require_unused_mask(tiny_target, [often, long])
    found = rf"\(id {mask}\) is a token that tiny says: 11 of the 35 supervised tokens; choose an unused one"
    with pytest.raises(UserError, match=found):
        require_unused_mask(tiny_target, [asked, often])
