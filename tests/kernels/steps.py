"""Steps to verify: ragged ones of every kind, and many draws of a target that is a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.kernels.verification import DraftDistribution, Sampling, Verification, Verified, draft_ids

Verify = Callable[[Verification], Verified]


@dataclass(frozen=True)
class Implementation:
    """`draws` is how many of a test's draws it can make in the same time, `steps` how many of ten uneven
    steps."""

    verify: Verify
    draws: float
    steps: int = 10


def sampling(requests: int, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0,
             seed: int = 0) -> Sampling:
    """The same for all requests, but for their seeds."""
    def same(value: float) -> Tensor:
        return torch.full((requests,), float(value))

    return Sampling(same(temperature), same(top_k).int(), same(top_p), same(min_p),
                    torch.arange(requests) + seed * 2 ** 33, torch.zeros(requests, dtype=torch.int64))


def joined(parts: list[Sampling]) -> Sampling:
    """All requests of `parts`, their seeds apart."""
    names = Sampling.__dataclass_fields__
    whole = Sampling(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
    return replace(whole, seed=torch.arange(len(whole.seed)) + whole.seed[0])


def uneven(seed: int, block: bool = False, one_hot: bool = True, dtype: torch.dtype = torch.float32,
           vocabulary: int = 1500) -> Verification:
    """Requests of one row to five, with all that the records allow; ties, and numbers that are none."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], count: int) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    requests = 1 + seed % 6
    lengths = torch.randint(1, 6, (requests,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows, request = int(starts[-1]), torch.arange(requests).repeat_interleave(lengths)
    logits = torch.randn(rows, vocabulary + 40, generator=generator) * [1, 3, 8][seed % 3]
    logits = (logits.round() if seed % 4 == 0 else logits).to(dtype)
    if seed % 5 == 0:
        logits[torch.rand(logits.shape, generator=generator) < 0.05] = torch.nan
    if seed % 7 == 0:
        logits[seed % rows] = -torch.inf
    logits[:, vocabulary:] = 100
    near = logits[:, :vocabulary].float().nan_to_num(nan=-50, neginf=-50)
    drafter = near + torch.randn(near.shape, generator=generator) / 2
    ids = torch.randperm(vocabulary, generator=generator)[:vocabulary // 2] if seed % 2 else None
    drafter = drafter if ids is None else drafter[:, ids]
    temperature = pick([0.4, 0.7, 1], requests)
    scaled = drafter / temperature[request, None]
    drafts = torch.multinomial(scaled.softmax(1), 1, generator=generator)[:, 0]
    drawn = DraftDistribution(drafter, temperature, scaled.logsumexp(1),
                              drafter.gather(1, drafts[:, None])[:, 0], ids,
                              None if ids is None else draft_ids(ids, vocabulary))
    drafts = drafts if ids is None else ids[drafts]
    if one_hot:
        drafts = torch.where(torch.rand(rows, generator=generator) < 0.7, near.argmax(1), drafts)
    drafts[torch.rand(rows, generator=generator) < 0.08] = -1
    if seed % 3:
        drafts[starts[1:] - 1] = -1
    how = Sampling(pick([0, 0.5, 0.7, 1, 1.3, 1e-5], requests), pick([0, 0, 1, 5, 20, 200], requests).int(),
                   pick([1, 1, 0.9, 0.5, 0.95], requests), pick([0, 0, 0.05, 0.2], requests),
                   torch.randint(-2 ** 62, 2 ** 62, (requests,), generator=generator),
                   torch.randint(2 ** 40, (requests,), generator=generator))
    return Verification(logits, starts.int(), drafts, how, vocabulary, None if one_hot else drawn, block)


@dataclass(frozen=True)
class Chain:
    """A target and a drafter that know a token's next one from a table: logits [V, V] each; the drafter has
    `ids` alone, all for None, and says its most likely one where `one_hot`."""

    target: Tensor
    drafter: Tensor
    temperature: float = 0.8
    ids: Tensor | None = None
    one_hot: bool = False

    @classmethod
    def random(cls, size: int, seed: int = 0, **changed: object) -> Chain:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(size, size, generator=generator) * 1.5
        return cls(target, target * 0.5 + torch.randn(size, size, generator=generator), **changed)

    def propose(self, last: Tensor, k: int, generator: torch.Generator
                ) -> tuple[Tensor, DraftDistribution | None]:
        """Drafts [N, k] behind tokens [N], and what they were drawn from, with a row behind each."""
        rows, drafts, places = [], [], []
        for _ in range(k):
            logits = self.drafter[last] if self.ids is None else self.drafter[last][:, self.ids]
            rows.append(logits)
            chances = (logits / self.temperature).softmax(1)
            place = chances.argmax(1, keepdim=True) if self.one_hot else \
                torch.multinomial(chances, 1, generator=generator)
            places.append(place)
            last = place[:, 0] if self.ids is None else self.ids[place[:, 0]]
            drafts.append(last)
        behind = torch.stack(drafts, 1)
        if self.one_hot:
            return behind, None
        logits = torch.stack([*rows, rows[-1]], 1).flatten(0, 1)
        place = torch.cat([*places, places[-1]], 1)
        inverse = None if self.ids is None else draft_ids(self.ids, self.target.shape[1])
        return behind, DraftDistribution(
            logits, torch.full((len(last),), self.temperature), (logits / self.temperature).logsumexp(1),
            logits.gather(1, place.view(-1, 1))[:, 0], self.ids, inverse)

    def step(self, last: Tensor, how: Sampling, k: int, generator: torch.Generator, block: bool = False
             ) -> Verification:
        """A step of N requests behind tokens [N], with k drafts each."""
        drafts, drawn = self.propose(last, k, generator)
        rows = self.target[torch.cat([last[:, None], drafts], 1)].flatten(0, 1)
        starts = torch.arange(len(last) + 1, dtype=torch.int32) * (k + 1)
        drafts = torch.cat([drafts, torch.full_like(drafts[:, :1], -1)], 1).flatten()
        return Verification(rows, starts, drafts, how, self.target.shape[1], drawn, block)

    def generate(self, verify: Verify, how: Sampling, length: int, k: int, block: bool = False,
                 changed: Callable[[Verification], Verification] = lambda step: step,
                 seed: int = 0) -> Tensor:
        """[N, length] the first tokens behind token 0, in as many steps as it takes."""
        generator = torch.Generator().manual_seed(seed)
        requests = len(how.seed)
        tokens = torch.full((requests, length + k + 1), -1)
        count = torch.zeros(requests, dtype=torch.int64)
        while (count < length).any():
            some = (count < length).nonzero()[:, 0]
            last = torch.where(count[some] > 0, tokens[some, (count[some] - 1).clamp(min=0)], 0)
            here = Sampling(**{name: getattr(how, name)[some] for name in Sampling.__dataclass_fields__})
            here = replace(here, position=count[some])
            done = verify(changed(self.step(last, here, k, generator, block)))
            place = torch.arange(done.tokens.shape[1])
            kept = place < done.counts[:, None]
            at = count[some, None] + place
            tokens[some[:, None].expand_as(at)[kept], at[kept]] = done.tokens[kept]
            count[some] += done.counts
        return tokens[:, :length]


def cells(tokens: Tensor, size: int) -> Tensor:
    """[N] int64: one number for each sequence of tokens [N, length]."""
    return (tokens * size ** torch.arange(tokens.shape[1]).flip(0)).sum(1)
