"""EAGLE-3 against its equations in float64: what training unrolls is what decoding does, step by step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from slow_decoder import SAMPLES, check_logits, slow_sums
from slow_eagle3 import SlowEagle3
from tiny import objective, small, uneven

from trainer.architectures.eagle3 import Eagle3
from trainer.records import Batch
from trainer.target import Target
from trainer.target_head import load_target_head

STEPS, GAMMA = 4, 3.0
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def make(target: Target, **settings: Any) -> Eagle3:
    settings["objective"] = objective(settings.get("objective", "ce"), gamma=GAMMA)
    return uneven(small(target, "eagle3", **{"layers": 1, "anchors": None, **settings}))


def slow_of(drafter: Eagle3, target: Target) -> SlowEagle3:
    head = load_target_head(target.folder, target.config)
    return SlowEagle3(drafter.export(), head.embedding, head.head)


@pytest.mark.parametrize("style", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("flags", [(), ("norm_before_residual", "fc_norm", "norm_output"),
                                   ("norm_before_fc",), ("train_head",)])
def test_training_and_drafting_have_the_logits_of_the_slow_decoder(target: Target, batch: Batch, style: str,
                                                                   layers: int,
                                                                   flags: tuple[str, ...]) -> None:
    drafter = make(target, style=style, layers=layers, **dict.fromkeys(flags, True)).eval()
    slow = slow_of(drafter, target)
    places = torch.tensor([1, 7, 20, 24 + 1, 37 + 11])
    with torch.no_grad():
        trained = drafter.vocabulary.logits(drafter.drafted(batch, places))
    assert trained.shape[:2] == (5, STEPS)
    check_logits(drafter, slow, batch, places.tolist(), trained, slow.ids)


def test_every_flag_changes_the_drafts(target: Target, batch: Batch) -> None:
    found = []
    for chosen in itertools.chain([()], ((flag,) for flag in FLAGS)):
        drafter = make(target, **dict.fromkeys(chosen, True)).eval()
        context = drafter.extend(drafter.new_context(), batch.tokens[:9].tolist(), batch.taps[:9])
        found.append(drafter.draft_logits(context, 5, STEPS))
    assert all(not torch.allclose(one, two) for one, two in itertools.combinations(found, 2))


@pytest.mark.parametrize(("term", "layers", "train_head"), [
    ("ce", 1, False), ("ce", 2, False), ("kl", 1, False), ("kl", 2, False), ("kl", 1, True)])
def test_sums_over_a_packed_row_are_those_of_the_slow_decoder(target: Target, batch: Batch, term: str,
                                                              layers: int, train_head: bool) -> None:
    """Of a head that is trained, too: the teacher's stays the target's."""
    drafter = make(target, objective=term, draft_vocab_size=150, layers=layers, train_head=train_head)
    slow, head = slow_of(drafter, target), load_target_head(target.folder, target.config)
    expected = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for document, sample in enumerate(SAMPLES):
        rows = batch.document == document
        tokens, taps = list(sample.tokens), batch.taps[rows]
        teacher = head.logits(batch.last[rows]) if term == "kl" else None
        sums = slow_sums(lambda anchor, tokens=tokens, taps=taps: slow.draft(
            tokens, taps, anchor, STEPS, forced=tokens[anchor + 1:]), slow.ids, tokens, sample.loss_mask,
            STEPS, GAMMA, teacher, first_anchor=1)
        expected = {name: expected[name] + value for name, value in sums.items()}
    step = drafter.loss(batch)
    length, first = step.ratios["accepted_length"], step.ratios["accepted@1"]
    found = {"loss": float(step.loss_sum.detach()), "count": float(step.count), "first": float(first.total),
             "accepted": float(length.total - length.count), "blocks": float(length.count)}
    assert found == pytest.approx(expected, rel=1e-4) and found["blocks"] == 17 + 6 + 12


@pytest.mark.parametrize("rows", [150, None])
def test_a_head_of_its_own(target: Target, batch: Batch, rows: int | None) -> None:
    """It begins as the target's, is trained, and goes with the folder, a whole one as well."""
    kept, trained = (small(target, "eagle3", layers=1, draft_vocab_size=rows, train_head=own)
                     for own in (False, True))
    head = load_target_head(target.folder, target.config)
    assert torch.equal(kept.loss(batch).loss_sum, trained.loss(batch).loss_sum)
    assert "lm_head.weight" not in kept.export().weights if rows is None else \
        torch.equal(kept.export().weights["lm_head.weight"], trained.export().weights["lm_head.weight"].to(
            kept.vocabulary.head.dtype))
    trained.loss(batch).loss_sum.backward()
    assert trained.vocabulary.head.grad.abs().sum() > 0 and "vocabulary.head" not in trained.export().weights
    with torch.no_grad():
        trained.vocabulary.head += 0.1 * torch.randn(trained.vocabulary.head.shape)
    again = Eagle3.restore(trained.export(), "native", head)
    contexts = [each.extend(each.new_context(), batch.tokens[:9].tolist(), batch.taps[:9])
                for each in (trained.eval(), again)]
    found = [each.draft_logits(context, 5, STEPS)
             for each, context in zip((trained, again), contexts, strict=True)]
    assert torch.equal(*found)
    assert not torch.allclose(found[0], kept.draft_logits(contexts[0], 5, STEPS))


def test_a_later_token_changes_nothing_before_it(target: Target, batch: Batch) -> None:
    """A draft at 10 reads, when it is trained, the true tokens 11, 12, ... one step after each: step s reads
    none after 10 + s, and no state of the target after 9."""
    for layers in (1, 2):
        drafter = make(target, layers=layers)
        anchors = torch.tensor([10, 12])
        with torch.no_grad():
            before = drafter.drafted(batch, anchors)
            tokens, taps = batch.tokens.clone(), batch.taps.clone()
            tokens[12:24], taps[10:24] = 7, 9.0
            after = drafter.drafted(replace(batch, tokens=tokens, taps=taps), anchors)
        assert torch.equal(before[0, :2], after[0, :2]) and not torch.allclose(before[0, 2], after[0, 2])
        assert not torch.allclose(before[1, 0], after[1, 0])


def test_fewer_anchors_are_a_part_of_all(target: Target, batch: Batch) -> None:
    """With one layer only the drawn drafts are computed; they are what they are among all."""
    for layers in (1, 2):
        every, few = make(target, layers=layers), make(target, layers=layers, anchors=5)
        (places, valid), (chosen, _) = every.draw(batch), few.draw(batch)
        assert int(valid.sum()) == 35 and set(chosen.tolist()) < set(places[valid].tolist())
        with torch.no_grad():
            one, two = every.drafted(batch, places), few.drafted(batch, chosen)
        rows = [places.tolist().index(place) for place in chosen.tolist()]
        torch.testing.assert_close(one[rows], two, atol=1e-5, rtol=1e-5)


def test_an_anchor_has_a_token_before_it(target: Target, batch: Batch) -> None:
    everything = replace(batch, loss_mask=batch.document >= 0)
    anchors, valid = make(target).draw(everything)
    assert sorted(set(range(56)) - set(anchors[valid].tolist())) == [0, 23, 24, 36, 37, 55]


def test_settings_that_exclude_each_other_are_said() -> None:
    assert Eagle3.check(norm_before_fc=True, fc_norm=False) == {}
    assert list(Eagle3.check(norm_before_fc=True, fc_norm=True)) == ["fc_norm"]
