"""The engine in this process against plain transformers: greedy text, sampling, hidden states, sessions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import engine, random_samples
from transformers import AutoModelForCausalLM

from trainer.engines.drawing import NUCLEUS, generator, nucleus, pick, tokens_of
from trainer.engines.transformers import TransformersEngine
from trainer.errors import UserError
from trainer.records import KeysValues, LastState, Sampling
from trainer.target import Target

GREEDY = Sampling(40, 0.0, 1.0, 0)
PROMPTS = [sample.tokens for sample in random_samples((9, 30, 3, 17, 24), seed=4)]
KEYS = [f"k{number}" for number in range(5)]
ENDS = (258, *range(25))  # many, so that rows leave the batch at different times


@pytest.fixture(scope="module")
def model(tiny_target: Target) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()


def alone(model: Any, prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    """The greedy answer of transformers' own loop."""
    with torch.inference_mode():
        found = model.generate(torch.tensor([prompt]),
                               attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                               max_new_tokens=new, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0)
    return tuple(found[0, len(prompt):].tolist())


def generate(target: Target, prompts: list[tuple[int, ...]], keys: list[str], sampling: Sampling,
             **settings: Any) -> list[tuple[tuple[int, ...], str]]:
    with engine(**settings).load(target.folder, ENDS) as loaded:
        return [(each.tokens, each.finish_reason) for each in loaded.generate(prompts, keys, sampling)]


def test_greedy_answers_are_those_of_transformers(tiny_target: Target, model: Any) -> None:
    found = generate(tiny_target, PROMPTS, KEYS, GREEDY)
    assert [tokens for tokens, _ in found] == [alone(model, prompt, 40) for prompt in PROMPTS]
    assert len({len(tokens) for tokens, _ in found}) > 2, "rows leave the batch at different times"
    for tokens, reason in found:
        assert (tokens[-1] in ENDS) == (reason == "stop") and not set(tokens[:-1]) & set(ENDS)


def test_the_cache_grows_past_its_first_blocks(tiny_target: Target, model: Any) -> None:
    prompts = [sample.tokens for sample in random_samples((127, 120, 250, 3), seed=2)]
    found = generate(tiny_target, prompts, KEYS[:4], Sampling(150, 0.0, 1.0, 0))
    assert [tokens for tokens, _ in found] == [alone(model, prompt, 150) for prompt in prompts]
    assert max(len(prompt + tokens) for prompt, (tokens, _) in zip(prompts, found, strict=True)) > 257


def test_a_draw_depends_on_seed_and_key_alone(tiny_target: Target) -> None:
    warm = Sampling(25, 0.9, 0.95, 3)
    together = generate(tiny_target, PROMPTS, KEYS, warm)
    assert generate(tiny_target, PROMPTS, KEYS, warm) == together
    assert generate(tiny_target, PROMPTS[::-1], KEYS[::-1], warm)[::-1] == together
    assert generate(tiny_target, PROMPTS[2:3], KEYS[2:3], warm) == together[2:3]
    assert generate(tiny_target, PROMPTS, KEYS, Sampling(25, 0.9, 0.95, 4)) != together
    same = generate(tiny_target, PROMPTS[:1] * 5, KEYS, warm)
    assert len(set(same)) == 5, "requests of one prompt differ by their keys"


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.6), (2.0, 0.9)])
def test_samples_follow_the_filtered_distribution(tiny_target: Target, model: Any, temperature: float,
                                                  top_p: float) -> None:
    count = 3000
    with torch.inference_mode():
        scaled = model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / temperature
    wanted = dict(enumerate(scaled.softmax(-1).tolist()))
    nucleus: dict[int, float] = {}
    for token, share in sorted(wanted.items(), key=lambda item: -item[1]):
        if sum(nucleus.values()) >= top_p:
            break
        nucleus[token] = share
    found = Counter(tokens[0] for tokens, _ in generate(
        tiny_target, [PROMPTS[0]] * count, [str(number) for number in range(count)],
        Sampling(1, temperature, top_p, 0)))
    assert set(found) <= set(nucleus)
    total = sum(nucleus.values())
    for token, share in nucleus.items():
        expected = share / total
        deviation = (expected * (1 - expected) / count) ** 0.5
        assert abs(found[token] / count - expected) < 5 * deviation + 1 / count


def filtered(logits: torch.Tensor, sampling: Sampling, seen: set[int]) -> dict[int, float]:
    """The distribution that is drawn from, token by token as the definitions have it."""
    values = {token: value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
              for token, value in enumerate(logits.tolist()) if token in seen}
    values = {**dict(enumerate(logits.tolist())), **values}
    shares = {token: math.exp(value / sampling.temperature) for token, value in values.items()}
    best = max(shares.values())
    kept = [token for token in sorted(shares, key=lambda each: -shares[each])
            if shares[token] >= sampling.min_p * best][:sampling.top_k or None]
    total = sum(shares[token] for token in kept)
    found: dict[int, float] = {}
    for token in kept:
        if sum(found.values()) >= sampling.top_p:
            break
        found[token] = shares[token] / total
    return {token: share / sum(found.values()) for token, share in found.items()}


@pytest.mark.parametrize("changes", [
    {"top_k": 5}, {"min_p": 0.3}, {"repetition_penalty": 1.4}, {"top_k": 1000, "min_p": 0.0},
    {"top_k": 12, "min_p": 0.1, "top_p": 0.8, "repetition_penalty": 0.7}])
def test_tokens_are_left_out_and_repeated_ones_made_less_likely(changes: dict[str, Any]) -> None:
    count, drawing = 4000, torch.Generator().manual_seed(1)
    logits = torch.randn(1, 30, generator=drawing, dtype=torch.float64) * 2
    sampling, seen = replace(Sampling(1, 0.9, 1.0, 0), **changes), {3, 7, 11}
    wanted = filtered(logits[0], sampling, seen if sampling.repetition_penalty != 1 else set())
    known = tokens_of([[*seen]], logits).expand(count, -1) if sampling.repetition_penalty != 1 else None
    drawn = [generator(0, str(each)) for each in range(count)]
    found = Counter(pick(logits.expand(count, -1), sampling, drawn, known).tolist())
    assert set(found) <= set(wanted)
    for token, share in wanted.items():
        assert abs(found[token] / count - share) < 5 * (share * (1 - share) / count) ** 0.5 + 1 / count


def test_a_greedy_answer_repeats_less_with_a_penalty(tiny_target: Target, model: Any) -> None:
    """As transformers' own loop has it; rows leave the batch at different times."""
    how = Sampling(30, 0.0, 1.0, 0, repetition_penalty=1.3)
    found = generate(tiny_target, PROMPTS, KEYS, how)
    for prompt, (tokens, _) in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            own = model.generate(torch.tensor([prompt]),
                                 attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                 max_new_tokens=30, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0,
                                 repetition_penalty=1.3)
        assert tokens == tuple(own[0, len(prompt):].tolist())
    assert found != generate(tiny_target, PROMPTS, KEYS, replace(how, repetition_penalty=1.0))


def test_likelihoods_are_those_of_the_model(tiny_target: Target, model: Any) -> None:
    with engine().load(tiny_target.folder, ENDS) as loaded:
        found = [*loaded.likelihoods(iter(PROMPTS))]
        with pytest.raises(UserError, match="a row has 512 tokens but target_engine.max_length is 512"):
            next(loaded.likelihoods([[1] * 512]))
    for row, own in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            shares = model(torch.tensor([row])).logits[0].log_softmax(-1)
        wanted = [float(shares[place, token]) for place, token in enumerate(row[1:])]
        assert own == pytest.approx(wanted, abs=1e-4) and len(own) == len(row) - 1


@pytest.mark.parametrize("spread", [(8.0, 8.0), (8.0, 0.01), (0.0, 8.0)])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_sorting_all(spread: tuple[float, float],
                                                                  top_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 4 * NUCLEUS, generator=generator, dtype=torch.float64) * torch.tensor([spread]).T
    kept = nucleus(logits, top_p)
    for row, found in zip(logits, kept, strict=True):
        shares, ids = row.softmax(-1).sort(descending=True, stable=True)
        size = int((shares.cumsum(-1) - shares < top_p).sum())
        assert int(found.isfinite().sum()) == size
        if row.std() > 0:  # else all are alike, and any so many will do
            assert set(found.isfinite().nonzero()[:, 0].tolist()) == set(ids[:size].tolist())
        assert torch.equal(found[found.isfinite()], row[found.isfinite()])


def test_answers_are_handed_over_as_they_end(tiny_target: Target) -> None:
    """Group after group; the steps behind an answer are not computed before somebody wants the next."""
    longest = Sampling(40, 0.0, 1.0, 0)
    whole = dict(zip(KEYS, generate(tiny_target, PROMPTS, KEYS, longest), strict=True))
    fetched: list[int] = []
    groups = (fetched.append(number) or dict(zip(KEYS, PROMPTS, strict=True)) for number in range(2))
    with engine().load(tiny_target.folder, ENDS) as loaded:
        passes = Counter()
        loaded.model.register_forward_pre_hook(lambda *_: passes.update(["all"]))
        found, needed = [], []
        for key, answer in loaded.completions(groups, longest):
            found.append((key, answer))
            needed.append((passes["all"], len(answer.tokens), list(fetched)))
            if len(found) == len(KEYS):
                assert fetched == [0]
    assert {key: (each.tokens, each.finish_reason) for key, each in found[:len(KEYS)]} == whole
    names = [key for key, _ in found]
    assert names[len(KEYS):] == names[:len(KEYS)]
    first = needed[:len(KEYS)]
    assert len({length for _, length, _ in first}) > 1, "some end before others"
    assert all(passed == length for passed, length, _ in first), "one pass a token"
    seconds = [each.seconds for _, each in found[:len(KEYS)]]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_an_answer_ends_where_the_engine_s_length_does(tiny_target: Target) -> None:
    [(tokens, reason)] = generate(tiny_target, PROMPTS[1:2], KEYS[:1], GREEDY, max_length=33)
    [(whole, _)] = generate(tiny_target, PROMPTS[1:2], KEYS[:1], GREEDY)
    assert tokens == whole[:3] and reason == "length"
    with pytest.raises(UserError, match="a row has 30 tokens but target_engine.max_length is 30"):
        generate(tiny_target, PROMPTS, KEYS, GREEDY, max_length=30)


@pytest.mark.parametrize("prefill_tokens", [0, 64])
def test_hidden_states_are_those_of_the_decoder(tiny_target: Target, model: Any, prefill_tokens: int) -> None:
    """All but the last, which transformers reports after the final norm and we want before it."""
    with engine(prefill_tokens=prefill_tokens).load(tiny_target.folder, ENDS) as loaded:
        found = list(loaded.hidden_states(PROMPTS, [0, 2, 3]))
    assert len(found) == len(PROMPTS)
    for prompt, state in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            output = model(torch.tensor([prompt]), output_hidden_states=True)
            normed = model.get_decoder().norm(state.last)
            logits = model.lm_head(normed)
        embedded, after_two, after_all = state.taps.chunk(3, dim=-1)
        assert torch.equal(embedded, output.hidden_states[0][0])
        torch.testing.assert_close(after_two, output.hidden_states[2][0], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(normed, output.hidden_states[3][0], atol=1e-4, rtol=1e-5)
        assert torch.equal(after_all, state.last)
        assert not torch.allclose(state.last, output.hidden_states[3][0])
        torch.testing.assert_close(logits, output.logits[0], atol=1e-4, rtol=1e-5)


def test_a_session_reads_step_by_step_and_forgets(tiny_target: Target, model: Any) -> None:
    tokens = PROMPTS[1]
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    with engine().load(tiny_target.folder, ENDS) as loaded:
        session = loaded.session([1, 2])
        session.step(tokens[:10])
        session.step([7, 8, 9, 10, 11])  # a draft of which two tokens are taken back, then all of it
        session.rewind(13)
        session.rewind(10)
        parts = [session.step(tokens[10:11]), session.step(tokens[11:])]
        session.rewind(len(tokens))
    logits, taps = (torch.cat([part[index] for part in parts]) for index in range(2))
    torch.testing.assert_close(logits, output.logits[0, 10:], atol=1e-4, rtol=1e-5)
    expected = torch.cat([output.hidden_states[1][0, 10:], output.hidden_states[2][0, 10:]], dim=-1)
    torch.testing.assert_close(taps, expected, atol=1e-4, rtol=1e-5)


def test_rewinding_leaves_no_trace(tiny_target: Target) -> None:
    with engine().load(tiny_target.folder, ENDS) as loaded:
        fresh, rewound = loaded.session([1]), loaded.session([1])
        fresh.step(PROMPTS[0])
        rewound.step(PROMPTS[0])
        rewound.step([1, 2, 3])
        rewound.rewind(len(PROMPTS[0]))
        for one, two in zip(fresh.step([5, 6]), rewound.step([5, 6]), strict=True):
            assert torch.equal(one, two)


TAPS = (2, 4, LastState(), KeysValues("sliding_attention"), KeysValues("full_attention"))


def test_keys_and_values_are_those_that_the_target_shares(tiny_gemma4: Target) -> None:
    """Of the last layer of each kind; of several rows in one pass as of one."""
    rows = [sample.tokens for sample in random_samples((40, 23), seed=5)]
    model = AutoModelForCausalLM.from_pretrained(tiny_gemma4.folder, dtype=torch.float32).eval()
    for prefill_tokens in (0, 200):
        with engine(prefill_tokens=prefill_tokens).load(tiny_gemma4.folder, ENDS) as loaded:
            found = list(loaded.hidden_states(rows, TAPS))
        for row, states in zip(rows, found, strict=True):
            with torch.inference_mode():
                kept = model.get_decoder()(torch.tensor([row]), return_shared_kv_states=True,
                                           use_cache=False).shared_kv_states
            shared = [part[0].transpose(0, 1).flatten(1) for kind in ("sliding_attention", "full_attention")
                      for part in kept[kind]]
            assert torch.equal(states.taps[:, 64:128], states.last)  # layer 4 of 4
            torch.testing.assert_close(states.taps[:, 128:], torch.cat([states.last, *shared], dim=-1),
                                       atol=1e-4, rtol=1e-4)


def test_a_session_with_a_window_is_rewound_beyond_it(tiny_gemma4: Target) -> None:
    """Sliding attention sees 16 tokens here; a refused draft is longer."""
    [sample] = random_samples((50,), seed=5)
    with engine().load(tiny_gemma4.folder, ENDS) as loaded:
        whole, session, parts = next(loaded.hidden_states([sample.tokens], TAPS)), loaded.session(TAPS), []
        for start, end in ((0, 10), (10, 40), (40, 41), (41, 50)):
            parts.append(session.step(sample.tokens[start:end])[1])
            session.step([7] * 20)
            session.rewind(end)
    torch.testing.assert_close(torch.cat(parts), whole.taps, atol=1e-4, rtol=1e-4)


def test_the_model_is_freed_on_the_way_out(tiny_target: Target) -> None:
    bound = engine().load(tiny_target.folder, ENDS)
    assert isinstance(bound, TransformersEngine) and bound.model is None, "binding loads nothing"
    with bound as loaded:
        assert loaded.model is not None and loaded.group == 4 and loaded.max_length == 512
    assert bound.model is None
