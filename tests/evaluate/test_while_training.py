"""Acceptance while training: the estimate is what decoding measures, and what parts them is told by name."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    acceptance,
    dflash,
    engine,
    make_dflash,
    make_small,
    random_samples,
    small,
    states_of,
    suits,
)
from torch import Tensor

from trainer.architectures.base import Drafter, Exported
from trainer.architectures.dflash import DFlash
from trainer.data.packing import collate
from trainer.engines.transformers import TransformersSession
from trainer.errors import GateFailed, UserError
from trainer.evaluate.while_training import AcceptanceRuntime, _error
from trainer.gates import require
from trainer.records import HiddenStates, Sample, Sampling, Tap
from trainer.target import Target
from trainer.training.measuring import Measured

DRAFTERS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/drafter").glob("*.yaml"))
States = Callable[[Sample], HiddenStates]


def answered(target: Target, count: int, temperature: float = 0.0, seed: int = 0) -> list[Sample]:
    """Random prompts and what the target says to them."""
    prompts = [sample.tokens for sample in random_samples(range(9, 9 + count), seed=seed)]
    with engine(batch=count).load(target.folder, target.end_ids) as loaded:
        answers = loaded.generate(prompts, list(map(str, range(count))), Sampling(30, temperature, 1.0, 0))
    return [Sample(f"{seed}.{number}#0", (*prompt, *answer.tokens),
                   (False,) * len(prompt) + (True,) * len(answer.tokens))
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]


def states_by(target: Target, samples: list[Sample], layers: Sequence[Tap]) -> States:
    known = dict(zip([sample.id for sample in samples], states_of(target, samples, layers), strict=True))
    return lambda sample: known[sample.id]


def learnt(drafter: Drafter, samples: list[Sample], states: States, steps: int = 35) -> Drafter:
    """The drafter once it knows these samples rather by heart."""
    batch = collate(samples, [states(sample) for sample in samples], 1, "cpu")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        step = drafter.loss(batch)
        (step.loss_sum / step.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter


@pytest.fixture(scope="module")
def samples(tiny_target: Target) -> list[Sample]:
    return answered(tiny_target, 6)


@pytest.fixture(scope="module")
def states(tiny_target: Target, samples: list[Sample]) -> States:
    return states_by(tiny_target, samples, [1, 2])


@pytest.fixture(scope="module")
def able(tiny_target: Target, samples: list[Sample], states: States) -> DFlash:
    return learnt(dflash(tiny_target, anchors=64, layers=1), samples, states)


def measure(drafter: Drafter, target: Target, samples: list[Sample], states: States, folder: Path,
            training: list[Sample] | None = None, **changes: Any) -> Measured:
    runtime = AcceptanceRuntime([drafter.formats[0]], "cpu")
    made = acceptance(1, **{"prompts": 6, "runtime": runtime, **changes})
    return made.measure(drafter, target, samples, samples if training is None else training, states,
                        folder / "measured")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_estimate_is_the_measurement(name: str, tiny_target: Target, tiny_gemma4: Target,
                                         samples: list[Sample], tmp_path: Path) -> None:
    if not suits(tiny_target, name):
        tiny_target, samples = tiny_gemma4, answered(tiny_gemma4, 6)
    made = make_small(name)
    states = states_by(tiny_target, samples, made.func.reads(**made.keywords)[0])
    settings = {"anchors": 64, "objective": "ce"} | ({"layers": 1} if "layers" in made.keywords else {})
    drafter = learnt(small(tiny_target, name, **settings), samples, states)
    before = copy.deepcopy(drafter.state_dict())
    torch.manual_seed(5)
    found = measure(drafter, tiny_target, samples, states, tmp_path)
    drawn = torch.rand(3)
    assert found.measured == found.estimate_walk > 1.1 and (found.gap, found.gap_error) == (0, 0)
    assert found.heldout_walk == found.train_walk == pytest.approx(found.measured, rel=0.05)
    assert found.prompts == 6 and require(found.gates)["measured_acceptance_gap"]["bound"] == 0.1
    assert not any(tmp_path.iterdir()) and drafter.training
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5))), "randomness is left"


def test_sampled_answers_make_no_gap(tiny_target: Target, able: DFlash, tmp_path: Path) -> None:
    """They part from the greedy walk at once; their prompts' stored states are still the same."""
    sampled = answered(tiny_target, 6, temperature=1.5)
    found = measure(able, tiny_target, sampled, states_by(tiny_target, sampled, [1, 2]), tmp_path)
    assert found.measured == found.estimate_walk > 1.2 * found.heldout_walk and found.gates[0].passed


class OtherLayers(DFlash):
    def export(self) -> Exported:
        found = super().export()
        other = [layer + 1 for layer in self.tap_layers]
        found.flavours["native"]["eagle_aux_hidden_state_layer_ids"] = other
        found.flavours["native"]["dflash_config"]["target_layer_ids"] = [layer - 1 for layer in other]
        return found


class OtherRope(DFlash):
    def export(self) -> Exported:
        found = super().export()
        return replace(found, geometry=found.geometry | {"rope_parameters": {"rope_type": "default",
                                                                             "rope_theta": 1.5}})


class OtherMask(DFlash):
    def export(self) -> Exported:
        found = super().export()
        found.flavours["native"]["dflash_config"]["mask_token_id"] = 65
        return found


class OtherTensor(DFlash):
    def export(self) -> Exported:
        found = super().export()
        found.weights["fc.weight"] = found.weights["fc.weight"].flip(1)
        return found


@pytest.mark.parametrize(("kind", "said"), [
    (OtherLayers, r"names layer ids \[2, 3\] where the drafter is trained on \[1, 2\]: see export\(\)"),
    (OtherRope, r"has another rotary\.inverse than the trained drafter: a config key \(rope"),
    (OtherTensor, r"has another fc\.weight than the trained drafter"),
    (OtherMask, r"a config key without a tensor \(mask token")])
def test_a_wrong_folder_is_told_by_its_cause(kind: type[DFlash], said: str, tiny_target: Target,
                                             able: DFlash, samples: list[Sample], states: States,
                                             tmp_path: Path) -> None:
    wrong = copy.deepcopy(able)
    wrong.__class__ = kind
    found = measure(wrong, tiny_target, samples, states, tmp_path)
    right = measure(able, tiny_target, samples, states, tmp_path)
    assert found.estimate_walk == pytest.approx(right.estimate_walk, rel=0.1)  # the answers' ends differ
    assert found.measured < 0.9 * found.estimate_walk and found.gap == pytest.approx(
        found.measured / found.estimate_walk - 1)
    assert found.line().endswith("not served as trained") and not found.overfits
    with pytest.raises(GateFailed, match=f"gate measured_acceptance_gap failed: .* must be <= .*{said}.*"
                                         r"accepted length 1\.\d+ decoded, \d\.\d+ by training's own"):
        require(found.gates)
    assert not any(tmp_path.iterdir())


def test_states_one_layer_off_are_told(tiny_target: Target, samples: list[Sample], tmp_path: Path) -> None:
    """Stored under the ids of the layers above: trained on, too, so that only serving shows it."""
    off = states_by(tiny_target, samples, [0, 1])
    drafter = learnt(dflash(tiny_target, anchors=64, layers=1), samples, off)
    found = measure(drafter, tiny_target, samples, off, tmp_path)
    assert found.estimate_walk > 1.2 and found.gap < -0.1
    with pytest.raises(GateFailed, match=r"stored hidden states of layer [12] differ by \d+% from those that "
                                         r"the target gives now: they are stale, of another target, or one"):
        require(found.gates)


class Turned(TransformersSession):
    """Gives the tapped layers in another order than one pass does."""

    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, taps = super().step(tokens)
        return logits, torch.cat(taps.chunk(2, dim=-1)[::-1], dim=-1)


def test_a_session_unlike_one_pass_is_told(tiny_target: Target, able: DFlash, samples: list[Sample],
                                           states: States, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engines.transformers.TransformersSession", Turned)
    found = measure(able, tiny_target, samples, states, tmp_path)
    with pytest.raises(GateFailed, match=r"the engine of train\.acceptance\.engine gives other hidden"):
        require(found.gates)


def test_overfitting_is_no_fault(tiny_target: Target, able: DFlash, samples: list[Sample],
                                 tmp_path: Path) -> None:
    others = answered(tiny_target, 6, seed=8)
    states = states_by(tiny_target, [*samples, *others], [1, 2])
    found = measure(able, tiny_target, others, states, tmp_path, training=samples)
    assert found.gap == 0 and found.gates[0].passed
    assert found.overfits and found.train_walk > 1.2 * found.heldout_walk
    assert found.line().endswith("overfitting") and found.figures()["overfits"] is True
    assert not measure(able, tiny_target, samples, states, tmp_path).overfits


def test_one_prompt_cannot_be_judged(tiny_target: Target, able: DFlash, samples: list[Sample], states: States,
                                     tmp_path: Path) -> None:
    found = measure(able, tiny_target, samples[:1], states, tmp_path)
    assert found.gates == [] and found.gap_error is None and "gap_error" not in found.figures()
    assert "±" not in found.line() and not found.overfits


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_the_error_of_a_mean_is_the_standard_error(values: list[float]) -> None:
    found = _error(lambda part: statistics.fmean(values[place] for place in part), len(values))
    assert found == pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-9)


def test_samples_are_spread_and_have_room() -> None:
    made = acceptance(1, prompts=3, computing=engine(max_length=30))
    known = random_samples([40] * 8, prompt=20)
    long = random_samples([40], prompt=29, seed=1)
    assert [sample.id for sample in made.usable([*long, *known])] == ["s0", "s2", "s5"]
    assert made.usable(long) == [] and made.usable(known[:2]) == known[:2]


def tagged(samples: list[Sample], *tags: dict[str, str]) -> list[Sample]:
    return [replace(sample, **tags[number % len(tags)]) for number, sample in enumerate(samples)]


KINDS = ({"category": "code", "language": "en"}, {"category": "chat", "language": "es"})


def test_each_slice_is_measured_and_the_mix_of_them(tiny_target: Target, able: DFlash, samples: list[Sample],
                                                    states: States, tmp_path: Path) -> None:
    """As if each slice were measured alone."""
    given = tagged(samples, *KINDS)
    weights = {"category": {"code": 3, "chat": 1}}
    found = measure(able, tiny_target, given, states, tmp_path, weights=weights)
    assert list(found.slices) == ["chat", "code", "language=en", "language=es"], "in others they are alike"
    alone = {kind["category"]: measure(able, tiny_target, given[place::2], states, tmp_path)
             for place, kind in enumerate(KINDS)}
    for kind in KINDS:
        length = found.slices[kind["category"]]
        assert length == found.slices[f"language={kind['language']}"] == alone[kind["category"]].measured
    assert found.slices["code"] != found.slices["chat"] and alone["code"].slices == {}
    assert found.mix == pytest.approx(4 / (3 / found.slices["code"] + 1 / found.slices["chat"]))
    figures, chat = found.figures(), found.slices["chat"]
    assert figures["mix"] == round(found.mix, 5) and figures["measured/chat"] == round(chat, 5)
    assert f"; by slice: chat {chat:.2f}, code " in found.line() and "; mix " in found.line()
    plain = measure(able, tiny_target, samples, states, tmp_path)
    assert plain.measured == found.measured and plain.mix is None and "mix" not in plain.figures()
    assert "slice" not in plain.line()


def test_prompts_of_the_mix_are_taken_in_turn() -> None:
    known = tagged(random_samples([40] * 9, prompt=20), *[KINDS[0]] * 2, {"category": "math"})
    made = acceptance(1, prompts=4, weights={"category": {"code": 1, "math": 5}})
    assert [sample.id for sample in made.usable(known)] == ["s0", "s1", "s2", "s5"]
    made.require(known)
    only = acceptance(1, prompts=4, weights={"category": {"math": 1}})
    assert [sample.id for sample in only.usable(known)] == ["s2", "s5", "s8"]
    assert len(only.usable(known[:2])) == 2, "of training samples any may stand for those that are not there"


def test_a_slice_that_cannot_be_measured_is_told() -> None:
    known = tagged(random_samples([40] * 4 + [60], prompt=20), *[KINDS[0]] * 4, {"category": "math"})
    with pytest.raises(UserError, match=r"^train\.acceptance\.weights weighs the category 'maths', but no .*"
                                        r"; nearest: math \(there: code, math\)"):
        acceptance(1, weights={"category": {"maths": 1}}).require(known)
    both, long = {"category": {"math": 1, "code": 1}}, random_samples([60], prompt=50)
    for made, heldout in ((acceptance(1, prompts=1, weights=both), known),
                          (acceptance(1, prompts=3, computing=engine(max_length=30), weights=both),
                           known[:4] + tagged(long, {"category": "math"}))):
        with pytest.raises(UserError, match="'math', but none of the [13] answers that are measured is"):
            made.require(heldout)


def test_when_it_measures() -> None:
    steps = range(1, 12)
    assert [step for step in steps if acceptance(4).due(step, 11)] == [4, 8, 11]
    assert [step for step in steps if acceptance(None).due(step, 11)] == []
    assert [step for step in steps if acceptance(50).due(step, 11)] == [11]


class Remote(type(engine())):
    in_flight = 3


def test_settings_are_judged_before_the_run() -> None:
    assert acceptance(1, k=4).check(make_dflash()) == {}
    assert acceptance(1, k=5).check(make_dflash()) == {
        "k": "must lie between 1 and 4, the longest draft with drafter.block_size=5, but is 5"}
    assert acceptance(1, weights={"turns": {"first": 1}}).check(make_dflash()).keys() == {"weights.turns"}
    [(key, text)] = acceptance(None, weights={"turn": {"first": 1}}).check(make_dflash()).items()
    assert key == "weights" and "as train.acceptance.every is null" in text
    [(key, text)] = acceptance(1, computing=engine(kind=Remote)).check(make_dflash()).items()
    assert key == "engine" and "must compute in this process" in text
    away = engine()
    away.device = "cuda:99"
    with pytest.raises(UserError, match="hardware.device=cuda:99"):
        acceptance(1, computing=away).preflight()
    with pytest.raises(UserError, match="hardware.verify=triton needs the logits of a CUDA or ROCm device"):
        acceptance(1, runtime=AcceptanceRuntime(["native"], "triton")).preflight()
