"""What is told of the drafter before training begins: its vocabulary, and a mask token that has a meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import make_small, random_samples

from trainer.errors import UserError
from trainer.records import Sample
from trainer.target import Target
from trainer.training.build import count_tokens, first_drafter, require_unused_mask


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
        "rows": 300, "total": 320, "covered": 1.0, "distinct": distinct, "special": 2, "curve": {}}
    assert f"is more than the {distinct} distinct tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="draft_vocab_size=2 must lie between 3, as 2 special tokens are in"):
        first_drafter(make_small("dflash", draft_vocab_size=2), tiny_target, counts)
    _, facts = first_drafter(make_small("dflash", draft_vocab_size=3), tiny_target, counts)
    assert facts["draft_vocabulary"]["covered"] > 0, "a token that is seen is in the smallest"
    capsys.readouterr()
    assert first_drafter(make_small("dflash", draft_vocab_size=None), tiny_target, counts)[1] == {}
    assert capsys.readouterr().out == ""


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
