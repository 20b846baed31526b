"""What a selection may look at, exactly: the law of the text under speculative sampling, summed over all
drafts in float64. A rule that looks at the token it decides about changes the law; ours does not."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from trainer.evaluate.decode import Selection

Tokens = tuple[int, ...]
Law = Callable[[Tokens], list[float]]  # of the next token after some
Estimate = Callable[[Tokens], float]   # a confidence logit, from the tokens that it may read


def emitted(p: Law, q: Law, logits: Callable[[Tokens, Tokens], Tensor], select: Selection, k: int,
            length: int) -> dict[Tokens, float]:
    """Chance of every text of `length` tokens: draft `k` from q, verify as many as selected against p (a
    rejected token is drawn again from max(p - q, 0)), one more from p when all hold, and so on."""
    tokens = range(len(p(())))

    @cache
    def after(known: Tokens) -> dict[Tokens, float]:
        if len(known) >= length:
            return {known[:length]: 1.0}
        steps: dict[Tokens, float] = defaultdict(float)
        for draft in itertools.product(tokens, repeat=k):
            chance, text = 1.0, known
            for place, token in enumerate(draft):
                chance *= q((*known, *draft[:place]))[token]
            for token in draft[:select.length(logits(known, draft))]:
                wanted, drafted = p(text), q(text)
                keep = min(1.0, wanted[token] / drafted[token])
                left = [max(0.0, one - two) for one, two in zip(wanted, drafted, strict=True)]
                for other in tokens if keep < 1 else ():
                    steps[*text, other] += chance * (1 - keep) * left[other] / sum(left)
                chance, text = chance * keep, (*text, token)
            for token in tokens:
                steps[*text, token] += chance * p(text)[token]
        total: dict[Tokens, float] = defaultdict(float)
        for text, chance in steps.items():
            for rest, share in after(text).items():
                total[rest] += chance * share
        return dict(total)

    return after(())


def target_law(p: Law, length: int) -> dict[Tokens, float]:
    found = {}
    for text in itertools.product(range(len(p(()))), repeat=length):
        found[text] = 1.0
        for place, token in enumerate(text):
            found[text] *= p(text[:place])[token]
    return found


def honest(estimate: Estimate) -> Callable[[Tokens, Tokens], Tensor]:
    """As `Drafter.confidence`: entry i reads the tokens before token i."""
    return lambda known, draft: torch.tensor([estimate((*known, *draft[:place]))
                                              for place in range(len(draft))], dtype=torch.float64)


def peeking(estimate: Estimate) -> Callable[[Tokens, Tokens], Tensor]:
    """Entry i reads token i as well."""
    return lambda known, draft: torch.tensor([estimate((*known, *draft[:place + 1]))
                                              for place in range(len(draft))], dtype=torch.float64)


def sure_of_zero(tokens: Tokens) -> float:
    return 40.0 if tokens and tokens[-1] == 0 else -40.0


def test_a_rule_that_looks_at_the_token_changes_the_text() -> None:
    """p = .7 / .3, q = .5 / .5: where only the token that is always accepted is verified, and the other one
    thrown away unseen, the first token comes .85 / .15."""
    def p(text: Tokens) -> list[float]:
        return [0.7, 0.3]

    def q(text: Tokens) -> list[float]:
        return [0.5, 0.5]

    select = Selection(0.5, [1.0])
    found = emitted(p, q, peeking(sure_of_zero), select, 1, 1)
    assert found == pytest.approx({(0,): 0.85, (1,): 0.15}, abs=1e-12)
    found = emitted(p, q, honest(sure_of_zero), select, 1, 1)
    assert found == pytest.approx({(0,): 0.7, (1,): 0.3}, abs=1e-12)


def tables(seed: int, count: int) -> Law:
    """A random law of the next of `count` tokens behind every text."""
    def law(text: Tokens) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % (1 << 60))
        return torch.randn(count, generator=generator, dtype=torch.float64).mul(1.5).softmax(0).tolist()

    return law


@pytest.mark.parametrize("seed", range(6))
def test_the_text_has_the_target_s_law(seed: int) -> None:
    """Estimates that follow the text in any way decide how much is verified, never what is said."""
    p, q = tables(seed, 2), tables(seed + 100, 2)

    def estimate(text: Tokens) -> float:
        return tables(seed + 200, 2)(text)[0] * 8 - 3

    select, seen = Selection(0.45, [1.3, 0.7, 1.0]), set()

    def logits(known: Tokens, draft: Tokens) -> Tensor:
        found = honest(estimate)(known, draft)
        seen.add(select.length(found))
        return found

    assert emitted(p, q, logits, select, 3, 4) == pytest.approx(target_law(p, 4), abs=1e-12)
    off = emitted(p, q, peeking(estimate), select, 3, 4)
    gap = max(abs(off[text] - chance) for text, chance in target_law(p, 4).items())
    assert len(seen) > 1 and (gap > 1e-3 or seed > 3), "most rules that look are found out"


@pytest.mark.parametrize(("logits", "threshold", "length"), [
    ([20.0, 20.0, 20.0], 1.0, 0), ([2.0, 2.0, -2.0, 40.0], 0.5, 2), ([-1.0, 40.0, 40.0], 0.5, 0),
    ([0.5, 0.5, 0.5], 0.0, 3), ([40.0, 40.0, 40.0], 0.999, 3)])
def test_a_draft_ends_before_the_first_doubt(logits: Sequence[float], threshold: float, length: int) -> None:
    assert Selection(threshold, [1.0] * 7).length(torch.tensor(logits)) == length
