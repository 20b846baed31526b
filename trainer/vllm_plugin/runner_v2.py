"""Model Runner V2: its sampler and its rejection sampler, verified by a kernel.

It notes the logits that drafts were drawn from, before the temperature, which is the request's; seeds and all
that is said of a request lie on the device. Without drafts it calls its sampler, with the same numbers here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled

from trainer.kernels.verification import DraftDistribution, Sampling, Verification
from trainer.vllm_plugin.features import unknown
from trainer.vllm_plugin.fused import Fused, only, top_k_or_off, wide

PROCESSORS = 3  # bias, penalties and bad words; all behind them are custom ones


def install(runner: Any, fused: Fused) -> str | None:
    """Puts `fused` behind the runner, or says what of its settings is not known. The samplers keep their
    state and only change their class: others hold them as well."""
    sampler, rejection = runner.sampler, runner.rejection_sampler
    problems = {
        "a sampler of the model's own": (type(sampler), type(rejection)) != (Sampler, RejectionSampler),
        "rejection_sample_method=synthetic":
            getattr(rejection, "synthetic_conditional_rates", None) is not None,
        "adaptive verification": getattr(rejection, "enable_adaptive_verification", False),
        "a watermark": getattr(rejection, "watermark_key", None) is not None,
        "sampling masks": getattr(sampler, "return_sampling_mask", False),
        "custom logits processors": len(getattr(sampler, "logits_processors", ())) > PROCESSORS,
    }
    if problem := next((name for name, found in problems.items() if found), None):
        return problem
    sampler.__class__, rejection.__class__ = FusedSampler, FusedRejectionSampler
    sampler.fused, sampler.unknown = fused, {}
    return None


class FusedSampler(Sampler):
    fused: Fused
    unknown: dict[int, tuple[str, ...]]  # by the place of a request among the runner's states

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self.unknown[req_idx] = unknown(sampling_params)

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        kept = self.kept(input_batch)
        if not kept.any() or len(logits) != input_batch.num_reqs:
            return super().__call__(logits, input_batch)
        drafts = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
        position = input_batch.positions[input_batch.logits_indices]
        ours = self.verified(logits, input_batch, kept, drafts, position, 1)
        return ours if kept.all() else overlaid(ours, super().__call__(logits, input_batch), kept)

    def kept(self, batch: Any) -> np.ndarray:
        """[B] bool: requests that are verified here."""
        found = [self.unknown.get(int(place), ()) for place in batch.idx_mapping_np]
        for each in found:
            self.fused.tell(each)
        return np.array([not each for each in found])

    def verified(self, logits: Tensor, batch: Any, kept: np.ndarray, drafts: Tensor, position: Tensor,
                 width: int, drawn: DraftDistribution | None = None, block: bool = False,
                 vocab_size: int | None = None) -> SamplerOutput:
        """The output for drafts [R] whose rows' own tokens have `position` [R]."""
        states, here, starts = self.sampling_states, batch.idx_mapping, batch.cu_num_logits
        sampling = Sampling(
            states.temperature.gpu[here], top_k_or_off(states.top_k.gpu[here], states.vocab_size),
            states.top_p.gpu[here], states.min_p.gpu[here], states.seeds.gpu[here],
            position[starts[:-1].long()] + 1)
        if not kept.all():
            drafts, sampling = only(async_tensor_h2d(kept, logits.device), drafts, starts, sampling)
        tokens, counts = self.fused.emit(Verification(
            logits, starts, drafts, sampling, vocab_size or logits.shape[1], drawn, block))
        counts, rejected = get_num_sampled_and_rejected(
            counts, batch.seq_lens, starts, here, self.req_states.prefill_len.gpu)
        nans = get_num_nans(logits) if self.compute_nans else None
        return SamplerOutput(wide(tokens, width), None, nans, counts, rejected)


class FusedRejectionSampler(RejectionSampler):
    sampler: FusedSampler

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None,
                 invalid_drafts: Tensor | None = None) -> SamplerOutput:
        sampler = self.sampler
        kept = sampler.kept(input_batch)
        if not kept.any():
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        tokens, position = gather_draft_sampled(
            input_batch.input_ids, input_batch.positions, input_batch.logits_indices,
            input_batch.expanded_idx_mapping, input_batch.expanded_local_pos,
            sampler.req_states.prefill_len.gpu)
        if invalid_drafts is not None:
            tokens = tokens.masked_fill(invalid_drafts, -1)
        drafts = torch.nn.functional.pad(tokens[1:], (0, 1), value=-1).long()  # a row verifies the next one's
        drafts[input_batch.cu_num_logits[1:].long() - 1] = -1
        drawn, vocab_size = None, logits.shape[1]
        if draft_logits is not None:
            vocab_size = min(vocab_size, draft_logits.shape[-1])  # as vLLM, where the target's is padded
            drawn = self._drawn(input_batch, draft_logits, drafts)
        ours = sampler.verified(logits, input_batch, kept, drafts, position, self.num_speculative_steps + 1,
                                drawn, self.use_block_verification, vocab_size)
        if kept.all():
            return ours
        return overlaid(ours, super().__call__(logits, input_batch, draft_logits, invalid_drafts), kept)

    def _drawn(self, batch: Any, draft_logits: Tensor, drafts: Tensor) -> DraftDistribution:
        """The rows' part of draft_logits [requests of the runner, steps, V]."""
        temperature = self.sampler.sampling_states.temperature.gpu
        temperature = torch.where(temperature > 0, temperature, 1)  # greedy requests: anything
        step = batch.expanded_local_pos.long().clamp(max=self.num_speculative_steps - 1)
        logits = draft_logits[batch.expanded_idx_mapping.long(), step]
        scaled = logits.float() / temperature[batch.expanded_idx_mapping, None]
        drawn = logits.gather(1, drafts.clamp(min=0, max=logits.shape[1] - 1)[:, None])[:, 0].float()
        return DraftDistribution(logits, temperature[batch.idx_mapping], scaled.logsumexp(1), drawn)


def overlaid(ours: SamplerOutput, theirs: SamplerOutput, kept: np.ndarray) -> SamplerOutput:
    """`theirs` with what requests that are kept [B] bool have of `ours`."""
    here = async_tensor_h2d(kept, ours.num_sampled.device)
    tokens = torch.where(here[:, None], ours.sampled_token_ids, theirs.sampled_token_ids)
    return replace(
        theirs, sampled_token_ids=tokens,
        num_sampled=torch.where(here, ours.num_sampled, theirs.num_sampled),
        num_rejected=torch.where(here, ours.num_rejected, theirs.num_rejected))
