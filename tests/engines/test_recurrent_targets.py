"""The engine in this process with a target of recurrent and attention layers: the same text and states as
transformers' own, also when tokens are taken back."""

from __future__ import annotations

import pytest
import torch
from mtp_targets import random_target
from tiny import engine, random_samples, small, uneven
from transformers import AutoModelForCausalLM

from trainer.evaluate.decode import decode
from trainer.kernels.select import verify
from trainer.records import Sampling
from trainer.target import Target

PROMPTS = [sample.tokens for sample in random_samples((9, 30, 3, 17, 24), seed=4)]
ENDS = (258, *range(25))  # many, so that rows leave the batch at different times


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return random_target("qwen3_5", tmp_path_factory.mktemp("made") / "qwen3_5")


def alone(target: Target, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                               max_new_tokens=new, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0)
    return tuple(found[0, len(prompt):].tolist())


def test_greedy_answers_of_a_batch_are_those_of_transformers(hybrid: Target) -> None:
    with engine().load(hybrid.folder, ENDS) as loaded:
        found = loaded.generate(PROMPTS, [*"abcde"], Sampling(30, 0.0, 1.0, 0))
    assert [each.tokens for each in found] == [alone(hybrid, prompt, 30) for prompt in PROMPTS]
    assert len({len(each.tokens) for each in found}) > 2


def test_tokens_that_are_taken_back_leave_no_trace(hybrid: Target) -> None:
    tokens = PROMPTS[1]
    with engine().load(hybrid.folder, ENDS) as loaded:
        [expected] = loaded.hidden_states([tokens], [4])
        session = loaded.session([4])
        session.step(tokens[:10])
        session.step([7, *tokens[11:14]])
        session.rewind(11)
        session.step([*tokens[11:13], 8])
        session.rewind(13)
        _, taps = session.step(tokens[13:])
        assert not torch.allclose(taps, expected.taps[13:], atol=1e-3), "token 10 was another one"
        session = loaded.session([4])
        session.step(tokens[:10])
        session.step([*tokens[10:13], 8, 9])
        session.rewind(13)
        _, taps = session.step(tokens[13:])
    torch.testing.assert_close(taps, expected.taps[13:], atol=1e-4, rtol=1e-4)


def test_drafting_with_its_own_module_leaves_the_text(hybrid: Target) -> None:
    drafter = uneven(small(hybrid, "mtp", start="own", tap_layers=[4])).eval()
    with engine().load(hybrid.folder, ENDS) as loaded:
        [plain] = loaded.generate(PROMPTS[1:2], ["a"], Sampling(20, 0.0, 1.0, 0))
        assert decode(loaded, drafter, verify("cpu"), PROMPTS[1], 3, 20, ENDS).tokens == plain.tokens
