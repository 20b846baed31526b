"""Model Runner V1: what it samples in a step, verified by a kernel.

It drafts with probabilities or without any, and calls its rejection sampler only in steps with a draft. A
request's numbers must not depend on whether others have drafts, so steps without any are sampled here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import SamplerOutput

from trainer.kernels.verification import DraftDistribution, Sampling, Verification
from trainer.vllm_plugin.features import unknown
from trainer.vllm_plugin.fused import Fused, only, top_k_or_off, wide

INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, eq=False)
class Known:
    """What is noted of a request at its first step."""

    params: Any
    seed: int
    unknown: tuple[str, ...]


def install(runner: Any, fused: Fused) -> str | None:
    """Puts `fused` behind the runner, or says what of its settings is not known."""
    if runner.rejection_sampler.synthetic_mode:
        return "rejection_sample_method=synthetic"
    runner._sample = Steps(runner, fused).sample
    return None


class Steps:
    """Stands in for `_sample` of one runner."""

    def __init__(self, runner: Any, fused: Fused) -> None:
        self.runner, self.fused, self.own = runner, fused, runner._sample
        self.requests: list[Known] = []
        self.seed = self.kept = torch.empty(0)

    def sample(self, logits: Tensor, metadata: Any) -> SamplerOutput:
        """`metadata`: vLLM's SpecDecodeMetadata, None in a step without drafts."""
        self._look()
        if all(each.unknown for each in self.requests) or self._of_others(logits, metadata):
            return self.own(logits, metadata)
        step = self._step(logits, metadata)
        tokens, _ = self.fused.emit(step)
        if not any(each.unknown for each in self.requests):
            self._go_on_as_if_drawn()
            return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=None)
        theirs = self.own(logits, metadata)
        ours = wide(tokens, theirs.sampled_token_ids.shape[1]).to(theirs.sampled_token_ids.dtype)
        theirs.sampled_token_ids = torch.where(self.kept[:, None], ours, theirs.sampled_token_ids)
        return theirs

    def _look(self) -> None:
        """Notes the requests of the step; what goes to the device is made anew when they change."""
        runner = self.runner
        requests = [self._known(runner.requests[name]) for name in runner.input_batch.req_ids]
        if requests == self.requests:
            return
        self.requests = requests
        for each in requests:
            self.fused.tell(each.unknown)
        seeds = np.array([each.seed for each in requests], dtype=np.int64)
        self.seed = async_tensor_h2d(seeds, runner.device)
        self.kept = async_tensor_h2d(np.array([not each.unknown for each in requests]), runner.device)

    def _known(self, state: Any) -> Known:
        """Kept with the request's own state, so that it goes when that goes."""
        known = getattr(state, "fused_verification", None)
        if known is None or known.params is not state.sampling_params:
            params = state.sampling_params
            # numpy's numbers are the same on all ranks, which must draw the same tokens
            seed = np.random.randint(INT64.min, INT64.max) if params.seed is None else params.seed
            without = ("min_p",) if params.min_p else ()  # this runner has none when it drafts
            known = Known(params, (int(seed) - INT64.min) % 2 ** 64 + INT64.min, unknown(params) + without)
            state.fused_verification = known
        return known

    def _step(self, logits: Tensor, metadata: Any) -> Verification:
        runner, device = self.runner, logits.device
        requests, rows, vocabulary = len(self.requests), *logits.shape
        drafts = torch.full((rows,), -1, dtype=torch.int64, device=device)
        drawn = None
        if metadata is None:
            starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
            first = runner.query_start_loc.gpu[1:requests + 1] - 1
        else:
            starts = torch.nn.functional.pad(metadata.cu_num_sampled_tokens.int(), (1, 0))
            first = metadata.logits_indices[starts[:-1].long()]
            drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()
            drawn = self._drawn(metadata, drafts, vocabulary)
        sampling = self._sampling(vocabulary, runner.positions[first.long()] + 1)
        if any(each.unknown for each in self.requests):
            drafts, sampling = only(self.kept, drafts, starts, sampling)
        return Verification(logits, starts, drafts, sampling, vocabulary, drawn)

    def _sampling(self, vocabulary: int, position: Tensor) -> Sampling:
        own, requests, device = self.runner.input_batch.sampling_metadata, len(self.requests), position.device
        none = torch.zeros(requests, device=device)
        return Sampling(
            none if own.temperature is None else own.temperature,
            none.int() if own.top_k is None else top_k_or_off(own.top_k, vocabulary),
            none + 1 if own.top_p is None else own.top_p, none, self.seed, position.long())

    def _drawn(self, metadata: Any, drafts: Tensor, vocabulary: int) -> DraftDistribution | None:
        """The drafter's probabilities, where it has some, as logits of temperature 1 whose sum is 1."""
        chances = self.runner._get_spec_decode_draft_probs(metadata)
        if chances is None:
            return None
        at = metadata.target_logits_indices.long()
        logits = chances.new_zeros(len(drafts), vocabulary).index_copy_(0, at, chances.log())
        one = torch.ones(len(self.requests), device=drafts.device)
        return DraftDistribution(logits, one, torch.zeros_like(logits[:, 0]),
                                 logits.gather(1, drafts.clamp(min=0)[:, None])[:, 0])

    def _of_others(self, logits: Tensor, metadata: Any) -> bool:
        """Whether the drafter's probabilities are of another vocabulary than the target's."""
        probabilities = self.runner._draft_probs if metadata is not None else None
        if probabilities is None or probabilities.shape[-1] == logits.shape[1]:
            return False
        self.fused.tell(["draft probabilities of another vocabulary"])
        return True

    def _go_on_as_if_drawn(self) -> None:
        """vLLM puts the generator of a seeded request back by one draw where its prompt is not read to the
        end, which one that nobody used does not take."""
        if self.runner.device.type != "cpu":  # generators of a CPU have no place to be put to
            for generator in self.runner.input_batch.generators.values():
                generator.set_offset(generator.get_offset() + 4)
