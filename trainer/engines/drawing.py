"""How the next token is drawn from logits, as vLLM does it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.records import Sampling

NUCLEUS = 1024  # tokens among which those of a top-p are looked for first


def generator(seed: int, key: str) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(number)


def pick(logits: Tensor, sampling: Sampling, generators: list[torch.Generator],
         seen: Tensor | None = None) -> Tensor:
    """Next token of every row, [B] int64: the argmax, or a draw after temperature, min-p, top-k and top-p, in
    the order of vLLM. `seen` [B, V] bool are the tokens that are repeated when they come again."""
    if seen is not None:
        logits = _without_repetition(logits.float(), seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.float() / sampling.temperature
    if sampling.min_p > 0:
        bound = scaled.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scaled = scaled.masked_fill(scaled < bound, float("-inf"))
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    if sampling.top_p < 1:
        scaled = nucleus(scaled, sampling.top_p)
    reached = scaled.softmax(-1).cumsum(-1)
    total = reached[:, -1:]  # which rounding moves off 1
    drawn = torch.cat([torch.rand(1, generator=each) for each in generators]).to(total.device)[:, None]
    below = torch.minimum(drawn * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(reached, below, right=True)[:, 0]


def tokens_of(prompts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """Which tokens stand in each prompt, [B, V] bool."""
    found = torch.zeros_like(logits, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        found[row, torch.tensor(list(prompt), device=logits.device)] = True
    return found


def _without_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """The logits [B, V] of tokens that were there divided by the penalty, negative ones multiplied (N. Keskar
    et al., CTRL, arXiv 1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """The logits [B, V], minus infinity where the likelier tokens alone have `top_p` of the probability."""
    shares = logits.softmax(-1)
    for width in (NUCLEUS, shares.shape[-1]):  # to sort all of a large vocabulary takes longer than the model
        likeliest, ids = shares.topk(min(width, shares.shape[-1]), dim=-1)
        if bool((likeliest.sum(-1) >= top_p).all()):
            break
    kept = likeliest.cumsum(-1) - likeliest < top_p
    return torch.full_like(logits, float("-inf")).scatter(
        -1, ids, logits.gather(-1, ids).masked_fill(~kept, float("-inf")))
