"""Answers of one engine, hidden states of another, and neither loaded before it is asked."""

from __future__ import annotations

import pytest
import torch
from tiny import engine, random_samples

from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.engines.split import SplitEngine
from trainer.engines.transformers import TransformersEngine
from trainer.engines.vllm_engine import VllmEngine
from trainer.errors import UserError
from trainer.pipeline import build
from trainer.records import Sampling
from trainer.target import Target

PROMPTS = [sample.tokens for sample in random_samples((9, 30, 3), seed=4)]
KEYS = ["a", "b", "c"]
GREEDY = Sampling(12, 0.0, 1.0, 0)
TAPS = (0, 1)


def parts() -> tuple[TransformersEngine, TransformersEngine]:
    return engine(batch=2), engine(dtype="bfloat16")


def test_each_does_its_own(tiny_target: Target) -> None:
    answers, states = parts()
    with SplitEngine(answers, states, "float32", states.max_length).load(tiny_target.folder, (258,)) as split:
        assert (split.group, split.in_flight, split.origin) == (2, 0, states.origin)
        assert answers.model is None and states.model is None
        answered = split.generate(PROMPTS, KEYS, GREEDY)
        assert answers.model is not None and states.model is None, "what is not asked for is not loaded"
        given = list(split.hidden_states(PROMPTS, TAPS))
        logits, _ = split.session(TAPS).step(PROMPTS[0])
        likely = list(split.likelihoods(PROMPTS))
    assert answers.model is None and states.model is None, "both are freed"
    with parts()[0].load(tiny_target.folder, (258,)) as alone:
        assert [each.tokens for each in answered] \
            == [each.tokens for each in alone.generate(PROMPTS, KEYS, GREEDY)]
    with parts()[1].load(tiny_target.folder, (258,)) as alone:
        for found, expected in zip(given, alone.hidden_states(PROMPTS, TAPS), strict=True):
            assert found.taps.dtype == torch.bfloat16 and torch.equal(found.taps, expected.taps)
        assert likely == list(alone.likelihoods(PROMPTS))
        assert torch.equal(logits, alone.session(TAPS).step(PROMPTS[0])[0])


def test_it_is_opened_again(tiny_target: Target) -> None:
    answers, states = parts()
    split = SplitEngine(answers, states, "float32", states.max_length).load(tiny_target.folder, (258,))
    found = []
    for _ in range(2):
        with split:
            found.append([each.tokens for each in split.generate(PROMPTS, KEYS, GREEDY)])
    assert found[0] == found[1]


def test_lengths_are_said_once() -> None:
    answers, states = parts()
    with pytest.raises(UserError, match=r"target_engine.answers.max_length=\d+ is not "
                                        r"target_engine.max_length=99; set the latter alone"):
        SplitEngine(answers, states, "float32", 99)


def test_the_configuration_makes_it() -> None:
    configuration = compose_configuration(["recipe=smoke", "target_engine=split", "target.max_length=99",
                                           "target_engine.dtype=float32"], find())
    made = build(configuration.settings["target_engine"])
    assert isinstance(made, SplitEngine) and (made.max_length, made.group) == (99, 256)
    assert isinstance(made.answers, VllmEngine) and isinstance(made.states, TransformersEngine)
    assert made.answers.settings.dtype == "float32" and made.states.dtype == torch.float32
    assert made.apart and not TransformersEngine.apart, "as what answers has it"
    assert made.answers.settings.max_num_seqs == made.answers.runtime.in_flight == 128
