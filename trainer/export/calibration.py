"""How sure a drafter is, made true: one temperature for each position of a draft, fitted in order.

A confidence head is trained on single positions behind true tokens; what decides is the product of its
estimates along a draft, which errs the more the longer the draft. Sequential temperature scaling (DSpark
paper) divides the logit of position i by T_i, chosen with T_1..T_{i-1} as they are, so that the product of
the first i estimates comes nearest to what was measured: whether the first i tokens were all right. Measured
on held-out answers of the target, along the drafter's own greedy drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.architectures.base import Drafter
from trainer.hidden_states.base import HiddenStateSource
from trainer.records import Sample

TEMPERATURES = torch.logspace(-1.5, 1.5, 301, dtype=torch.float64)  # 1 / 32 to 32, of which one is 1
BINS = 10


@dataclass(frozen=True)
class Drafts:
    """Held-out drafts: confidence `logits` [n, K] float64, and whether the first 1..K tokens were all right,
    `survived` [n, K] bool."""

    logits: Tensor
    survived: Tensor


def survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Calibrated chance [..., K] that the first 1..K tokens are all accepted, for logits [..., K]."""
    scale = torch.tensor(temperatures[:logits.shape[-1]], dtype=torch.float64, device=logits.device)
    return torch.sigmoid(logits.double() / scale).cumprod(-1)


def fit(drafts: Drafts) -> list[float]:
    """The temperatures of positions 1..K, by the mean squared error of the products."""
    before, found = torch.ones(len(drafts.logits), 1, dtype=torch.float64), []
    for logits, survived in zip(drafts.logits.T, drafts.survived.T, strict=True):
        products = before * torch.sigmoid(logits[:, None] / TEMPERATURES)
        best = int((products - survived[:, None].double()).pow(2).mean(0).argmin())
        before = products[:, best:best + 1]
        found.append(round(float(TEMPERATURES[best]), 4))
    return found


def error(drafts: Drafts, temperatures: Sequence[float]) -> float:
    """Expected calibration error: how far estimates are from the measured share in ten bins of equal width,
    weighted by their numbers of drafts, over all positions alike."""
    estimated = survival(drafts.logits, temperatures)
    bins = (estimated * BINS).long().clamp(max=BINS - 1)
    gaps = [(estimated - drafts.survived.double())[bins == each].sum().abs() for each in range(BINS)]
    return float(sum(gaps) / max(1, bins.numel()))


def held_out(drafter: Drafter, samples: Sequence[Sample], source: HiddenStateSource, count: int) -> Drafts:
    """About `count` drafts of the longest length, spread evenly over places of the samples whose next tokens
    are all known."""
    places = [(sample, place) for sample in samples for place in _anchors(sample, drafter.max_k)]
    chosen = places[::max(1, len(places) // count)][:count]
    logits, survived = [], []
    for sample, wanted in _by_sample(chosen):
        taps = source.get(sample).taps.float()
        context, known = drafter.new_context(), 0
        for place in wanted:
            context = drafter.extend(context, sample.tokens[known:place], taps[known:place])
            known = place
            draft = drafter.propose(context, sample.tokens[place], drafter.max_k)
            estimate = drafter.confidence(context, sample.tokens[place], draft)
            assert estimate is not None
            logits.append(estimate.double().cpu())
            right = torch.tensor(draft) == torch.tensor(sample.tokens[place + 1:place + 1 + len(draft)])
            survived.append(right.int().cumprod(0).bool())
    empty = torch.zeros(0, drafter.max_k)
    return Drafts(torch.stack(logits) if logits else empty.double(),
                  torch.stack(survived) if survived else empty.bool())


def calibrate(drafter: Drafter, samples: Sequence[Sample], source: HiddenStateSource,
              count: int) -> dict[str, object]:
    """The temperatures and what they are worth, JSON-able: fitted on every other sample, judged on the rest.
    Without held-out drafts nothing is changed: all temperatures are 1."""
    fitted, judged = (held_out(drafter, samples[start::2], source, count // 2) for start in (0, 1))
    if not len(fitted.logits):
        return {"temperatures": [1.0] * drafter.max_k, "drafts": 0}
    temperatures = fit(fitted)
    found: dict[str, object] = {"temperatures": temperatures, "drafts": len(fitted.logits)}
    if len(judged.logits):
        plain = [1.0] * len(temperatures)
        found |= {"judged_on": len(judged.logits), "error_before": round(error(judged, plain), 4),
                  "error_after": round(error(judged, temperatures), 4)}
    return found


def _anchors(sample: Sample, k: int) -> list[int]:
    """Places of sampled tokens, not the first of the text, with `k` sampled tokens right after them."""
    mask = sample.loss_mask
    return [place for place in range(1, len(mask) - k) if all(mask[place:place + k + 1])]


def _by_sample(chosen: Sequence[tuple[Sample, int]]) -> Iterator[tuple[Sample, list[int]]]:
    places: dict[str, tuple[Sample, list[int]]] = {}
    for sample, place in chosen:
        places.setdefault(sample.id, (sample, []))[1].append(place)
    yield from places.values()
