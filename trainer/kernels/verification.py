"""What a step of speculative decoding hands to be verified and what comes back: the records of every
implementation (`trainer.kernels.select.verify`).

B requests of R rows together; a row is one position of the target's logits, and the token that a row emits or
accepts follows it. Values are on the device and are not looked at here: shapes, types and places are. """

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class DraftDistribution:
    """What the drafts were drawn from: softmax(logits / temperature), at the temperature that the drafter
    really used. Without one in `Verification` a draft is the one token that its drafter could say.

    logits [R, V_draft] float, rows without a draft are ignored; temperature [B] float32, above 0; lse [R]
    float32, logsumexp(logits / temperature) noted when the draft was drawn, and drawn_logit [R] float32, the
    drafted token's logit before the division. A drafter with a vocabulary of its own has token_ids [V_draft]
    int64, the distinct target id of each of its ids, and their inverse draft_ids [V] int32, made once by
    `draft_ids`; target ids that it lacks have no chance. """

    logits: Tensor
    temperature: Tensor
    lse: Tensor
    drawn_logit: Tensor
    token_ids: Tensor | None = None
    draft_ids: Tensor | None = None


@dataclass(frozen=True)
class Sampling:
    """How each of B requests samples: temperature [B] float32 (0: greedy), top_k [B] int32 (0: off), top_p
    [B] float32 (1: off), min_p [B] float32 (0: off). seed [B] int64, the request's, and position [B] int64,
    the index in its text of the first token that this step emits, decide every random number. """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


@dataclass(frozen=True)
class Verification:
    """One step. target_logits [R, V_padded] as the head gave them, rows may lie apart; starts [B + 1] int32,
    rows of request b are starts[b] up to starts[b + 1], at least one each; drafts [R] int64, the token that a
    row verifies, -1 for none (the row behind the last draft, placeholders). Ids from vocab_size on are
    padding. `block` verifies a draft as a whole (arXiv 2403.10444) and not token by token. A ValueError says
    what does not fit. """

    target_logits: Tensor
    starts: Tensor
    drafts: Tensor
    sampling: Sampling
    vocab_size: int
    distribution: DraftDistribution | None = None
    block: bool = False

    def __post_init__(self) -> None:
        rows, width = _matrix(self.target_logits, "target_logits")
        if not 0 < self.vocab_size <= width:
            raise ValueError(f"vocab_size is {self.vocab_size}; target_logits have 1 to {width} ids")
        requests = len(self.starts) - 1
        if requests < 1:
            raise ValueError("starts has no request; it needs the first row of each and the end of the last")
        expected = {"starts": (self.starts, torch.int32, requests + 1),
                    "drafts": (self.drafts, torch.int64, rows)}
        for name, dtype in (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
                            ("min_p", torch.float32), ("seed", torch.int64), ("position", torch.int64)):
            expected[f"sampling.{name}"] = (getattr(self.sampling, name), dtype, requests)
        if self.distribution is not None:
            expected |= self._of_drafts(self.distribution, rows, requests)
        for name, (tensor, dtype, length) in expected.items():
            self._vector(name, tensor, dtype, length)

    def check_values(self) -> None:
        """A ValueError for values that no step has; waits for the device."""
        rows, sampling, drawn = len(self.target_logits), self.sampling, self.distribution
        wrong = {
            f"starts must rise from 0 to {rows}, a row at least for each request": not (
                self.starts[0] == 0 and self.starts[-1] == rows and (self.starts.diff() > 0).all()),
            "drafts are token ids or -1": (self.drafts < -1).any(),
            "sampling.temperature is a number from 0 on": not (
                sampling.temperature.isfinite() & (sampling.temperature >= 0)).all(),
            "sampling.top_k is 0 or more": (sampling.top_k < 0).any(),
            "sampling.top_p is a number up to 1": not (sampling.top_p <= 1).all(),
            "sampling.min_p is a number from 0 to 1": not (
                (sampling.min_p >= 0) & (sampling.min_p <= 1)).all(),
            "distribution.temperature is a number above 0": drawn is not None and not (
                drawn.temperature.isfinite() & (drawn.temperature > 0)).all(),
        }
        for expected, found in wrong.items():
            if found:
                raise ValueError(expected)

    def _of_drafts(self, drawn: DraftDistribution, rows: int, requests: int
                   ) -> dict[str, tuple[Tensor, torch.dtype, int]]:
        found, width = _matrix(drawn.logits, "distribution.logits")
        if found != rows or drawn.logits.device != self.target_logits.device:
            raise ValueError(f"distribution.logits has {found} rows on {drawn.logits.device}; target_logits "
                             f"has {rows} on {self.target_logits.device}")
        expected = {"distribution.temperature": (drawn.temperature, torch.float32, requests),
                    "distribution.lse": (drawn.lse, torch.float32, rows),
                    "distribution.drawn_logit": (drawn.drawn_logit, torch.float32, rows)}
        if drawn.token_ids is None and drawn.draft_ids is None:
            if width < self.vocab_size:
                raise ValueError(f"distribution.logits has {width} ids, the vocabulary {self.vocab_size}; "
                                 f"token_ids and draft_ids say which a smaller one has")
            return expected
        if drawn.token_ids is None or drawn.draft_ids is None:
            raise ValueError("distribution.token_ids and draft_ids come together: make the latter once with "
                             "verification.draft_ids")
        return expected | {"distribution.token_ids": (drawn.token_ids, torch.int64, width),
                           "distribution.draft_ids": (drawn.draft_ids, torch.int32, self.vocab_size)}

    def _vector(self, name: str, tensor: Tensor, dtype: torch.dtype, length: int) -> None:
        device = self.target_logits.device
        if tensor.shape != (length,) or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; expected "
                             f"[{length}] {dtype} on {device}")


@dataclass(frozen=True)
class Verified:
    """tokens [B, longest] int64, -1 behind what was emitted; counts [B] int32, emitted tokens: the accepted
    drafts and one more. `-1 - emitted` where the request came to a row whose maximum is not finite. """

    tokens: Tensor
    counts: Tensor

    def raise_faults(self) -> None:
        """A ValueError that names the requests with such a row; waits for the device."""
        counts = self.counts.tolist()
        faults = [f"request {index} behind {-1 - count} tokens"
                  for index, count in enumerate(counts) if count < 0]
        if faults:
            raise ValueError(f"the target's logits have no finite maximum: {', '.join(faults)}")


def draft_ids(token_ids: Tensor, vocab_size: int) -> Tensor:
    """[V] int32: the draft id of each target id, -1 where there is none, for token_ids [V_draft] int64."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int32, device=token_ids.device)
    inverse[token_ids] = torch.arange(len(token_ids), dtype=torch.int32, device=token_ids.device)
    return inverse


def _matrix(logits: Tensor, name: str) -> tuple[int, int]:
    if logits.ndim != 2 or logits.dtype not in FLOATS or logits.stride(1) != 1:
        raise ValueError(f"{name} is {list(logits.shape)} {logits.dtype} with strides {logits.stride()}; "
                         f"expected rows of bfloat16, float16 or float32 numbers that lie side by side")
    rows, width = logits.shape
    return rows, width
