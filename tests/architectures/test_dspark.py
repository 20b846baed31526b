"""DSpark against its equations in float64: base logits, Markov bias, confidence, the compound loss."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from slow_decoder import SAMPLES
from slow_dflash import SlowDFlash
from tiny import small, uneven
from torch import Tensor

from trainer.architectures.dspark import DSpark
from trainer.records import Batch
from trainer.target import Target
from trainer.target_head import load_target_head

SLOTS = 4


def make(target: Target, **settings: Any) -> DSpark:
    return uneven(small(target, "dspark", **{"block_size": SLOTS, "anchors": 60, **settings}))


class SlowDSpark(SlowDFlash):
    """One slot after the other; `first` is 0 where the anchor's slot predicts."""

    def __init__(self, drafter: DSpark, target: Target) -> None:
        head = load_target_head(target.folder, target.config)
        super().__init__(drafter.export(), head.embedding, head.head)
        self.first = 0 if drafter.export().flavours["speculators"]["sample_from_anchor"] else 1

    def draft(self, tokens: list[int], taps: Tensor, anchor: int, slots: int,
              forced: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [slots, Vd] and confidence logits [slots]; slots behind `forced` read token 0."""
        states = self.states(taps[:anchor], tokens[anchor], slots + self.first)[self.first:]
        first, second = (self.weights[f"markov_head.markov_w{part}.weight"] for part in (1, 2))
        weight, bias = (self.weights[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        token, logits, sure = tokens[anchor], [], []
        for slot, state in enumerate(states):
            logits.append(self.head @ state + second @ first[token])
            sure.append((weight @ torch.cat([state, first[token]]) + bias)[0])
            token = self.ids[int(logits[-1].argmax())] if forced is None else \
                forced[slot] if slot < len(forced) else 0
        return torch.stack(logits), torch.stack(sure)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_training_and_drafting_have_the_logits_of_the_slow_decoder(target: Target, batch: Batch,
                                                                   from_anchor: bool) -> None:
    drafter = make(target, sample_from_anchor=from_anchor).eval()
    assert drafter.max_k == (SLOTS if from_anchor else SLOTS - 1)
    slow = SlowDSpark(drafter, target)
    for place in (7, 20, 24 + 1, 37 + 11):
        rows = batch.document == batch.document[place]
        tokens, taps, anchor = batch.tokens[rows].tolist(), batch.taps[rows], int(batch.position[place])
        slots = min(drafter.max_k, len(tokens) - anchor)
        expected, sure = slow.draft(tokens, taps, anchor, drafter.max_k, forced=tokens[anchor + 1:])
        anchors, valid = torch.tensor([place]), torch.ones(1, dtype=torch.bool)
        with torch.no_grad():
            hidden = drafter.drafted(batch, anchors)[0]
            previous = drafter.targets(batch, anchors, valid, drafter.max_k).previous[0]
            found = drafter.row_logits(hidden, previous), drafter.row_confidence(hidden, previous)
        assert expected.std() > 0.5 and sure.std() > 0.01
        torch.testing.assert_close(found[0][:slots], expected[:slots].float(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[1][:slots], sure[:slots].float(), atol=1e-4, rtol=1e-4)
        context = drafter.extend(drafter.new_context(), tokens[:anchor], taps[:anchor])
        free = slow.draft(tokens, taps, anchor, drafter.max_k)
        draft = drafter.propose(context, tokens[anchor], drafter.max_k)
        drafted = drafter.draft_logits(context, tokens[anchor], drafter.max_k), \
            drafter.confidence(context, tokens[anchor], draft)
        for one, two in zip(drafted, free, strict=True):
            torch.testing.assert_close(one, two.float(), atol=1e-4, rtol=1e-4)


def test_the_compound_loss_is_its_formula(target: Target, batch: Batch) -> None:
    """0.1 CE + 0.9 L1 + BCE of the confidence against the overlap, weights exp(-k / 4), one denominator."""
    drafter = make(target, draft_vocab_size=None, confidence_weight=0.7)
    slow, head = SlowDSpark(drafter, target), load_target_head(target.folder, target.config)
    totals, count = dict.fromkeys(("ce", "tv", "confidence"), 0.0), 0.0
    for document, sample in enumerate(SAMPLES):
        rows = batch.document == document
        tokens, taps, teacher = list(sample.tokens), batch.taps[rows], head.logits(batch.last[rows]).double()
        for anchor in range(6, len(tokens) - 1):
            logits, sure = slow.draft(tokens, taps, anchor, SLOTS, forced=tokens[anchor + 1:])
            for slot in range(min(SLOTS, len(tokens) - 1 - anchor)):
                p, q = teacher[anchor + slot].softmax(-1), logits[slot].softmax(-1)
                alpha, weight = float(torch.minimum(p, q).sum()), exp(-slot / 4)
                c = 1 / (1 + exp(-float(sure[slot])))
                totals["ce"] -= 0.1 * weight * log(float(q[tokens[anchor + 1 + slot]]))
                totals["tv"] += 0.9 * weight * float((p - q).abs().sum())
                totals["confidence"] -= 0.7 * weight * (alpha * log(c) + (1 - alpha) * log(1 - c))
                count += weight
    step = drafter.loss(batch)
    assert float(step.count) == pytest.approx(count, rel=1e-5)
    found = {name.removeprefix("loss/"): float(ratio.total) for name, ratio in step.ratios.items()
             if name.startswith("loss/")}
    assert found == pytest.approx(totals, rel=1e-4)
    assert float(step.loss_sum.detach()) == pytest.approx(sum(totals.values()), rel=1e-4)


def test_the_overlap_gives_the_confidence_no_way_back_into_the_draft(target: Target, batch: Batch) -> None:
    """Only the confidence's own input is moved by its loss; the overlap it is compared with is a constant."""
    drafter = make(target)
    frozen = replace(drafter.objective, terms=[replace(term, weight=0.0) for term in drafter.objective.terms])
    drafter.objective = frozen
    drafter.loss(batch).loss_sum.backward()
    assert float(drafter.confidence_head.proj.weight.grad.abs().max()) > 0
    assert float(drafter.markov_head.markov_w2.weight.grad.abs().max()) == 0
