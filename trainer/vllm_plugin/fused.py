"""What both model runners do with a kernel: a step of requests that are verified here, and of others.

Requests with features that are not known here stay in the step, since leaving them out would copy the others'
logits; they are made as cheap as can be, one row and greedy, and what they emit is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import Logger

import torch
from torch import Tensor

from trainer.kernels.verification import Sampling, Verification, Verified

Verify = Callable[[Verification], Verified]


class Fused:
    """A kernel, and what was said about its requests."""

    def __init__(self, verify: Verify, log: Logger) -> None:
        self.verify, self.log = verify, log
        self.said: set[str] = set()

    def tell(self, features: Iterable[str]) -> None:
        """Says once of each feature that vLLM verifies requests with it."""
        for feature in features:
            self._once(f"fused verification does not know {feature}: vLLM verifies requests with it")

    def _once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            self.log.warning(message)

    def emit(self, step: Verification) -> tuple[Tensor, Tensor]:
        """What `step` emits: tokens [B, longest] int64, -1 behind the last, and their counts [B] int32.

        A request whose logits have no finite maximum emits token 0 there: vLLM, too, goes on with any token,
        and to emit none would leave its scheduler with drafts that it takes for accepted."""
        done = self.verify(step)
        faulty = done.counts < 0
        if done.counts.device.type == "cpu":  # elsewhere to look would be to wait
            if not faulty.any():
                return done.tokens, done.counts
            self._once("logits without a finite maximum came to fused verification, which emits token 0")
        counts = torch.where(faulty, -done.counts, done.counts)
        place = torch.arange(done.tokens.shape[1], device=counts.device)
        here = faulty[:, None] & (place == counts[:, None] - 1)
        return done.tokens.masked_fill(here, 0), counts


def only(kept: Tensor, drafts: Tensor, starts: Tensor, sampling: Sampling) -> tuple[Tensor, Sampling]:
    """Drafts [R] and sampling of a step in which requests that are not `kept`, [B] bool, cost one row."""
    request = torch.searchsorted(starts[1:], torch.arange(len(drafts), device=starts.device,
                                                          dtype=starts.dtype), right=True)
    greedy = Sampling(sampling.temperature * kept, *(getattr(sampling, name) for name in (
        "top_k", "top_p", "min_p", "seed", "position")))
    return drafts.masked_fill(~kept[request], -1), greedy


def wide(tokens: Tensor, width: int) -> Tensor:
    """tokens [B, n] as [B, width], -1 behind."""
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)


def top_k_or_off(top_k: Tensor, vocab_size: int) -> Tensor:
    """vLLM says the whole vocabulary for no filter, where a kernel's 0 saves the look."""
    return top_k.int().masked_fill(top_k >= vocab_size, 0)
