"""Sequential temperature scaling: known temperatures are found, and drafts are measured as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_samples, small, states_of, uneven

from trainer.export.calibration import Drafts, calibrate, error, fit, held_out, survival
from trainer.hidden_states.base import HiddenStateSource
from trainer.records import HiddenStates, Sample
from trainer.target import Target

TRUE = [2.0, 0.5, 1.0, 3.0]


class Kept(HiddenStateSource):
    ahead = 1

    def __init__(self, states: dict[str, HiddenStates]) -> None:
        self.states = states

    def get(self, sample: Sample) -> HiddenStates:
        return self.states[sample.id]

    def give_up(self) -> None: ...
    def close(self) -> None: ...


def drawn(count: int, seed: int) -> Drafts:
    """Drafts whose tokens are accepted as their logits say once these are divided by `TRUE`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, len(TRUE), generator=generator, dtype=torch.float64) * 3 + 1
    chances = torch.sigmoid(logits / torch.tensor(TRUE))
    right = torch.rand(logits.shape, generator=generator, dtype=torch.float64) < chances
    return Drafts(logits, right.int().cumprod(-1).bool())


def test_the_temperatures_behind_the_drafts_are_found() -> None:
    fitted, judged = drawn(40_000, 0), drawn(40_000, 1)
    temperatures = fit(fitted)
    assert temperatures == pytest.approx(TRUE, rel=0.2)
    before, after = error(judged, [1.0] * 4), error(judged, temperatures)
    assert after < 0.01 < 0.03 < before


def test_temperatures_are_fitted_in_order() -> None:
    """Those of the first positions do not change with what comes later."""
    drafts = drawn(3000, 2)
    shorter = Drafts(drafts.logits[:, :2], drafts.survived[:, :2])
    later = Drafts(torch.cat([drafts.logits[:, :2], -drafts.logits[:, 2:]], 1), drafts.survived)
    assert fit(drafts)[:2] == fit(shorter) == fit(later)[:2] and fit(drafts) != fit(later)


def test_the_error_is_the_gap_of_each_bin() -> None:
    """Two drafts at 0.5 of which one survives: none; four near 1 of which none does: all of it."""
    logits = torch.tensor([[0.0], [0.0], *[[40.0]] * 4], dtype=torch.float64)
    survived = torch.tensor([[True], [False], *[[False]] * 4])
    assert error(Drafts(logits[:2], survived[:2]), [1.0]) == pytest.approx(0, abs=1e-9)
    assert error(Drafts(logits, survived), [1.0]) == pytest.approx(4 / 6, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-60, 60), st.floats(0.03, 32)), min_size=1, max_size=9))
def test_chances_never_rise(pairs: list[tuple[float, float]]) -> None:
    logits, temperatures = (torch.tensor(each) for each in zip(*pairs, strict=True))
    chances = survival(logits, temperatures.tolist())
    assert chances.dtype == torch.float64 and bool((chances >= 0).all() and (chances <= 1).all())
    assert bool((chances.diff() <= 0).all())
    assert torch.equal(survival(logits[:1], temperatures.tolist()), chances[:1])


def test_drafts_are_measured_where_the_answer_is_known(tiny_target: Target) -> None:
    """The answers go on as the drafter would for a while, so that some of each length survive."""
    drafter = uneven(small(tiny_target, "dspark")).eval()
    samples = random_samples((30, 24, 40))
    states = dict(zip([each.id for each in samples], states_of(tiny_target, samples, [1, 2]), strict=True))
    drafts = held_out(drafter, samples, Kept(states), 1000)
    places = [(sample, place) for sample in samples for place in range(8, len(sample.tokens) - 5)]
    assert drafts.logits.shape == drafts.survived.shape == (len(places), 5)
    for row in (0, 7, 20, len(places) - 1):
        sample, place = places[row]
        context = drafter.extend(drafter.new_context(), sample.tokens[:place], states[sample.id].taps[:place])
        draft = drafter.propose(context, sample.tokens[place], 5)
        torch.testing.assert_close(drafter.confidence(context, sample.tokens[place], draft).double(),
                                   drafts.logits[row], atol=1e-4, rtol=1e-4)
        right = [one == two for one, two in zip(draft, sample.tokens[place + 1:], strict=False)]
        assert drafts.survived[row].tolist() == [all(right[:count]) for count in range(1, 6)]
    few = held_out(drafter, samples, Kept(states), 10)
    assert len(few.logits) == 10
    found = calibrate(drafter, samples, Kept(states), 40)
    assert found["drafts"] == 20 and 0 < found["judged_on"] <= 20 and len(found["temperatures"]) == 5
    assert 0 <= found["error_after"] <= 1 and 0 <= found["error_before"] <= 1


def test_without_held_out_drafts_nothing_is_changed(tiny_target: Target) -> None:
    drafter = small(tiny_target, "dspark")
    for samples in ([], random_samples((11,))):
        assert calibrate(drafter, samples, Kept({}), 40) == {"temperatures": [1.0] * 5, "drafts": 0}


def test_holes_between_answers_are_not_drafted_over(tiny_target: Target) -> None:
    [sample] = random_samples((20,), prompt=4)
    mask = tuple(flag and place != 12 for place, flag in enumerate(sample.loss_mask))
    holed = Sample(sample.id, sample.tokens, mask)
    [states] = states_of(tiny_target, [holed], [1, 2])
    drafter = small(tiny_target, "dspark", block_size=3)
    found = held_out(drafter, [holed], Kept({holed.id: states}), 100)
    assert len(found.logits) == len(range(4, 9)) + len(range(13, 17))
