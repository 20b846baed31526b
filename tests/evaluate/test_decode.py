"""Draft and verify: the text never changes, whatever is drafted, and steps are counted as vLLM counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny import dflash, engine, random_samples, small, states_of, uneven
from torch import Tensor

from trainer.architectures.base import Drafter, Exported
from trainer.engines.transformers import TransformersEngine
from trainer.evaluate.decode import Counts, Selection, decode
from trainer.kernels.select import verify
from trainer.kernels.verification import Verification, Verified
from trainer.records import Sample, Sampling, Step
from trainer.target import Target

PROMPT = random_samples((15,), seed=9)[0].tokens
LONG = 64  # tokens of the target's own continuation
CPU = verify("cpu")


class Told(Drafter):
    """Drafts the known continuation of a prompt, each token changed as `change(place in the draft, token)`
    says; its context is what it was given to read."""

    tap_layers, needs_last, max_k, method = (1, 2), False, 16, "told"

    def __init__(self, prompt: Sequence[int], continuation: Sequence[int],
                 change: Callable[[int, int], int] = lambda place, token: token) -> None:
        super().__init__()
        self.prompt, self.continuation, self.change = prompt, continuation, change
        self.read: list[Tensor] = []

    def new_context(self) -> int:
        self.read = []
        return 0

    def extend(self, context: int, tokens: Sequence[int], taps: Tensor) -> int:
        known = [*self.prompt, *self.continuation]
        assert list(tokens) == known[context:context + len(taps)], "tokens that the target has processed"
        self.read.append(taps)
        return context + len(taps)

    def propose(self, context: int, anchor: int, length: int) -> list[int]:
        done = context - len(self.prompt)
        assert anchor == self.continuation[done], "the anchor is the newest token, not read by the target yet"
        return [self.change(place, token)
                for place, token in enumerate(self.continuation[done + 1:done + 1 + length])]

    def loss(self, batch: Any) -> Step: ...
    def draft_logits(self, context: Any, anchor: int, length: int) -> Tensor: ...
    def export(self) -> Exported: ...
    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: Any) -> Told: ...
    @classmethod
    def longest_draft(cls, **settings: Any) -> int: ...


@pytest.fixture(scope="module")
def loaded(tiny_target: Target) -> Iterator[TransformersEngine]:
    with engine().load(tiny_target.folder, ()) as running:
        yield running


@pytest.fixture(scope="module")
def continuation(loaded: TransformersEngine) -> tuple[int, ...]:
    """What the target says when nothing ends it."""
    return loaded.generate([PROMPT], ["p"], Sampling(LONG, 0.0, 1.0, 0))[0].tokens


def wrong(place: int, token: int) -> int:
    return (token + 1) % 320


def test_true_drafts_are_accepted_whole(loaded: TransformersEngine, continuation: tuple[int, ...]) -> None:
    """One token comes from the prompt, then every step gives K + 1."""
    for k in (1, 3, 6):
        tokens = 1 + 4 * (k + 1)
        found = decode(loaded, Told(PROMPT, continuation), CPU, PROMPT, k, tokens, ())
        assert found.tokens == continuation[:tokens]
        assert found.counts == Counts(drafts=4, draft_tokens=4 * k, accepted=4 * k, per_position=[4] * k)


def test_wrong_drafts_give_one_token_a_step(loaded: TransformersEngine,
                                            continuation: tuple[int, ...]) -> None:
    found = decode(loaded, Told(PROMPT, continuation, wrong), CPU, PROMPT, 3, 20, ())
    assert found.tokens == continuation[:20]
    assert found.counts == Counts(drafts=19, draft_tokens=57, accepted=0, per_position=[0, 0, 0])


def test_acceptance_ends_at_the_first_wrong_token(loaded: TransformersEngine,
                                                  continuation: tuple[int, ...]) -> None:
    """The third of five is wrong: two are accepted, what is right behind it counts nothing."""
    drafter = Told(PROMPT, continuation, lambda place, token: wrong(place, token) if place == 2 else token)
    found = decode(loaded, drafter, CPU, PROMPT, 5, 1 + 3 * 7, ())
    assert found.tokens == continuation[:22]
    assert found.counts == Counts(drafts=7, draft_tokens=35, accepted=14, per_position=[7, 7, 0, 0, 0])


def test_a_step_counts_whole_even_when_the_answer_ends_within(loaded: TransformersEngine,
                                                              continuation: tuple[int, ...]) -> None:
    drafter = Told(PROMPT, continuation)
    cut = decode(loaded, drafter, CPU, PROMPT, 4, 8, ())
    assert cut.tokens == continuation[:8]
    assert cut.counts == Counts(drafts=2, draft_tokens=8, accepted=8, per_position=[2] * 4)
    end = next(place for place in range(3, 30) if continuation[place] not in continuation[:place]
               and place % 5 == 3)
    ended = decode(loaded, drafter, CPU, PROMPT, 4, LONG - 5, (continuation[end],))
    assert ended.tokens == continuation[:end + 1]
    steps = end // 5 + 1
    assert ended.counts == Counts(drafts=steps, draft_tokens=4 * steps, accepted=4 * steps,
                                  per_position=[steps] * 4)


def test_an_answer_of_one_token_needs_no_draft(loaded: TransformersEngine,
                                               continuation: tuple[int, ...]) -> None:
    for limit, ends in ((1, ()), (30, (continuation[0],))):
        found = decode(loaded, Told(PROMPT, continuation), CPU, PROMPT, 3, limit, ends)
        assert found.tokens == continuation[:1] and found.counts == Counts(per_position=[0, 0, 0])


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_is_that_of_plain_decoding(tiny_target: Target, loaded: TransformersEngine, k: int,
                                            seed: int) -> None:
    """For a drafter of random weights and for one that is right by chance, with end tokens in the way."""
    prompts = [sample.tokens for sample in random_samples((1, 9, 30), seed=seed)]
    ends = (258, *range(12))
    with engine().load(tiny_target.folder, ends) as bound:
        plain = [each.tokens for each in bound.generate(prompts, ["a", "b", "c"], Sampling(40, 0.0, 1.0, 0))]
    generator = torch.Generator().manual_seed(seed)

    def sometimes(place: int, token: int) -> int:
        return token if torch.rand((), generator=generator) < 0.7 else wrong(place, token)

    accepted = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        whole = loaded.generate([prompt], ["x"], Sampling(LONG, 0.0, 1.0, 0))[0].tokens
        for drafter in (uneven(dflash(tiny_target), seed), Told(prompt, whole, sometimes)):
            found = decode(loaded, drafter.eval(), CPU, prompt, k, 40, ends)
            assert found.tokens == expected
            counts = found.counts
            assert counts.accepted == sum(counts.per_position) and counts.draft_tokens == k * counts.drafts
            assert counts.per_position == sorted(counts.per_position, reverse=True)
        accepted += counts.accepted
    assert accepted > 0


def test_the_drafter_reads_the_states_of_committed_tokens_alone(tiny_target: Target,
                                                                loaded: TransformersEngine,
                                                                continuation: tuple[int, ...]) -> None:
    drafter = Told(PROMPT, continuation, lambda place, token: wrong(place, token) if place == 1 else token)
    found = decode(loaded, drafter, CPU, PROMPT, 3, 15, ())
    whole = PROMPT + found.tokens
    [expected] = states_of(tiny_target, [Sample("x", whole, (True,) * len(whole))], [1, 2])
    read = torch.cat(drafter.read)
    assert len(read) >= len(PROMPT) + 12
    torch.testing.assert_close(read, expected.taps[:len(read)], atol=1e-4, rtol=1e-5)


def by_argmax(step: Verification) -> Verified:
    """One greedy request, as plainly as can be."""
    wanted, draft = step.target_logits.argmax(-1).tolist(), step.drafts.tolist()[:-1]
    kept = next((place for place, token in enumerate(draft) if token != wanted[place]), len(draft))
    return Verified(torch.tensor([wanted[:kept + 1]]), torch.tensor([kept + 1], dtype=torch.int32))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_every_kernel_walks_as_a_comparison_of_the_most_likely_does(
        tiny_target: Target, loaded: TransformersEngine, continuation: tuple[int, ...], kernel: str) -> None:
    """Text, counts and what lies beyond, also with a reduced vocabulary and drafts cut by confidence."""
    def told(seed: int) -> Sure:
        chance = torch.Generator().manual_seed(seed)
        return Sure([2, 1, 0.5, -1], PROMPT, continuation, lambda place, token: token if torch.rand(
            (), generator=chance) < 0.8 else wrong(place, token))

    cases = [(lambda: uneven(dflash(tiny_target), 2).eval(), None), (lambda: told(1), None),
             (lambda: told(2), Selection(0.5, [1.0] * 4)),
             (lambda: uneven(small(tiny_target, "eagle3"), 3).eval(), None)]
    for make, select in cases:
        found, expected = (decode(loaded, make(), way, PROMPT, 4, 40, (300, 301), select)
                           for way in (verify(kernel), by_argmax))
        assert found == expected and found.counts.drafts > 3


class Sure(Told):
    """Tells these confidence logits of every draft."""

    estimates = True

    def __init__(self, logits: Sequence[float], *given: Any) -> None:
        super().__init__(*given)
        self.logits = torch.tensor(logits)

    def confidence(self, context: int, anchor: int, draft: Sequence[int]) -> Tensor:
        return self.logits[:len(draft)]


@pytest.mark.parametrize(("logits", "verified"), [([3, 3, -3, 9], 2), ([-9, 9, 9, 9], 0), ([9, 9, 9, 9], 4)])
def test_what_is_cut_is_not_verified(loaded: TransformersEngine, continuation: tuple[int, ...],
                                     logits: Sequence[float], verified: int) -> None:
    """True drafts: every step gives what was verified and one more, and the text is the same."""
    tokens, select = 1 + 3 * (verified + 1), Selection(0.5, [1.0] * 4)
    found = decode(loaded, Sure(logits, PROMPT, continuation), CPU, PROMPT, 4, tokens, (), select)
    assert found.tokens == continuation[:tokens]
    assert found.counts == Counts(drafts=3, draft_tokens=3 * verified, accepted=3 * verified,
                                  per_position=[3] * verified + [0] * (4 - verified))
    again = decode(loaded, Sure(logits, PROMPT, continuation, wrong), CPU, PROMPT, 4, tokens, (), select)
    assert again.tokens == continuation[:tokens] and again.counts.accepted == 0
    assert again.counts.draft_tokens == verified * again.counts.drafts


def test_it_ends_where_the_engine_s_length_does(tiny_target: Target, continuation: tuple[int, ...]) -> None:
    with engine(max_length=len(PROMPT) + 7).load(tiny_target.folder, ()) as short:
        plain = short.generate([PROMPT], ["p"], Sampling(40, 0.0, 1.0, 0))[0].tokens
        drafted = decode(short, Told(PROMPT, continuation), CPU, PROMPT, 3, 40, ()).tokens
        assert drafted == plain == continuation[:7]


def test_counts_are_added_by_position() -> None:
    total = Counts()
    total.add(Counts(2, 6, 3, [2, 1, 0]))
    total.add(Counts(1, 1, 1, [1]))
    assert total == Counts(3, 7, 4, [3, 1, 0])
