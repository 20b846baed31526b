"""A part of tools/bench_verify.py and no command: runs in vLLM's interpreter, takes what to measure as JSON
and the file for the figures.

The records are vLLM's own; of its model runner there is what verification reads of one (`Runner`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from turns import Call, by, in_turns, ratios, spread
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from trainer.errors import UserError
from trainer.vllm_plugin import load_kernel
from trainer.vllm_plugin.fused import Fused
from trainer.vllm_plugin.runner_v1 import Steps


@dataclass(frozen=True)
class Case:
    """One step: logits [R, V], `drafts` [B, k] int64, sampling the same for all B requests."""

    logits: Tensor
    drafts: Tensor
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def made(cls, vocabulary: int, requests: int, k: int, accept: float, dtype: torch.dtype,
             device: torch.device, temperature: float, **filters: Any) -> Case:
        """Rows whose most likely token has the chance `accept` at the temperature, or is drafted with it
        where the others cannot be drawn."""
        draw = torch.Generator(device=device).manual_seed(vocabulary + requests)
        rows = requests * (k + 1)
        logits = torch.empty(rows, vocabulary, dtype=dtype, device=device)
        best = torch.randint(vocabulary, (rows,), generator=draw, device=device)
        scale = temperature or 1.0
        for row in range(rows):
            values = torch.randn(vocabulary, generator=draw, device=device) * 1.5
            values[best[row]] = scale * ((values / scale).logsumexp(0) + np.log(accept / (1 - accept)))
            logits[row] = values
        drafts = best.view(requests, k + 1)[:, :k].clone()
        if temperature == 0:
            wrong = torch.rand(drafts.shape, generator=draw, device=device) >= accept
            drafts[wrong] = (drafts[wrong] + 1) % vocabulary
        return cls(logits, drafts, temperature, **filters)


@dataclass
class Runner:
    """What the plugin reads of Model Runner V1."""

    device: torch.device
    requests: dict[str, Any]
    input_batch: Any
    positions: Tensor
    _draft_probs: None = None
    own: Call | None = None
    rejection_sampler: Any = field(default=None)

    def _sample(self, logits: Tensor, metadata: SpecDecodeMetadata) -> Any:
        return self.rejection_sampler(metadata, None, logits, self.input_batch.sampling_metadata)

    def _get_spec_decode_draft_probs(self, metadata: SpecDecodeMetadata) -> None:
        """Its drafters say one token each."""


def sampling_metadata(case: Case) -> SamplingMetadata:
    requests, device = len(case.drafts), case.logits.device
    greedy, none = case.temperature == 0, torch.zeros(requests, device=device)
    return SamplingMetadata(
        temperature=None if greedy else none + case.temperature, all_greedy=greedy, all_random=not greedy,
        top_p=none + case.top_p if case.top_p < 1 else None,
        top_k=(none + case.top_k).int() if case.top_k else None,
        generators={}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=none + 1,
        output_token_ids=[], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors())


def draft_metadata(case: Case) -> SpecDecodeMetadata:
    requests, k = case.drafts.shape
    rows = torch.arange(requests * (k + 1), dtype=torch.int32, device=case.logits.device)
    by_request = rows.view(requests, k + 1)
    each = torch.arange(1, requests + 1, dtype=torch.int32, device=rows.device)
    return SpecDecodeMetadata(
        draft_token_ids=case.drafts.flatten().int(), num_draft_tokens=[k] * requests,
        cu_num_draft_tokens=each * k, cu_num_sampled_tokens=each * (k + 1),
        target_logits_indices=by_request[:, :k].flatten(), bonus_logits_indices=by_request[:, k].contiguous(),
        logits_indices=rows)


def v1_arms(case: Case, fused: Fused) -> dict[str, Call]:
    """`vllm` and `fused`: each gives tokens [B, k + 1], -1 behind what was emitted."""
    requests, device = len(case.drafts), case.logits.device
    params = SamplingParams(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p)
    states = {str(number): SimpleNamespace(sampling_params=params) for number in range(requests)}
    batch = SimpleNamespace(req_ids=list(states), sampling_metadata=sampling_metadata(case),
                            vocab_size=case.logits.shape[1], generators={})
    runner = Runner(device, states, batch, torch.arange(len(case.logits), device=device) + 100)
    runner.rejection_sampler = RejectionSampler(Sampler())
    steps, metadata = Steps(runner, fused), draft_metadata(case)
    return {"vllm": lambda: runner._sample(case.logits, metadata).sampled_token_ids,
            "fused": lambda: steps.sample(case.logits, metadata).sampled_token_ids}


def cell(case: Case, name: str, arms: dict[str, Call], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of one case; the tokens of greedy requests have to be the same by every arm."""
    tokens = {arm: call().long() for arm, call in arms.items()}
    if case.temperature == 0 and any(not torch.equal(tokens["fused"], each) for each in tokens.values()):
        raise UserError(f"greedy tokens differ at {len(case.drafts)} requests of {case.logits.shape[1]} ids: "
                        "one of the arms is wrong, and no time of it means anything")
    return {"vocabulary": case.logits.shape[1], "requests": len(case.drafts), "sampling": name,
            "seconds": {arm: spread(times) for arm, times in seconds.items()},
            "ratios": {arm: ratios(times, seconds["fused"]) for arm, times in seconds.items()
                       if arm != "fused"},
            "emitted": float((tokens["fused"] >= 0).sum(1).double().mean())}


def cases(request: dict[str, Any], device: torch.device) -> Any:
    for vocabulary in request["vocabulary"]:
        for requests in request["requests"]:
            for name, way in request["ways"].items():
                yield name, Case.made(vocabulary, requests, request["k"], request["accept"],
                                      getattr(torch, request["dtype"]), device, **way)


def expanded(x: Tensor, ends: Tensor, count: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """x [B] for every token, [count], whose last ones have `ends`. vLLM's build for CPUs drops what its own
    function of this place writes, and goes on with temperatures and filters that lay in memory."""
    lengths = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.int64))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(lengths, output_size=count)


def on_cpu(request: dict[str, Any], fused: Fused) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    current_platform.register_triton_kernel_overrides()
    rejection_sampler.expand_batch_to_tokens = expanded
    found = []
    for name, case in cases(request, torch.device("cpu")):
        arms = v1_arms(case, fused)
        found.append(cell(case, name, arms, in_turns(arms, request["rounds"], by(time.perf_counter))))
    goals = [{"what": f"{each['vocabulary']} ids, {each['requests']} requests, {each['sampling']}: "
                      "vllm / fused",
              "found": each["ratios"]["vllm"]["median"], "wanted": "more than 1",
              "met": each["ratios"]["vllm"]["median"] > 1} for each in found]
    return {"what": "cpu", "cells": found, "goals": goals}


def main(request: dict[str, Any], out: Path) -> None:
    kind = current_platform.device_type
    if request["gpu"] and not (kind == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--gpu needs a CUDA or ROCm device, and this vLLM computes on {kind}: run it where "
                        "one is, with --python naming a vLLM built for it")
    if not request["gpu"] and kind != "cpu":
        raise UserError(f"this vLLM computes on {kind}: give --gpu, or name a build for CPUs with --python")
    name, verify = load_kernel(None, kind)
    if request["gpu"]:
        from verify_gpu import measure as measure_gpu

        figures = measure_gpu(request, verify)
    else:
        import logging

        figures = on_cpu(request, Fused(verify, logging.getLogger(__name__)))
    figures["machine"] = {
        "kernel": name, "cores": len(os.sched_getaffinity(0)), "threads": request["threads"],
        "load": os.getloadavg()[0], "torch": torch.__version__, "python": platform.python_version()}
    how = {key: request[key] for key in ("k", "accept", "dtype", "rounds")}
    out.write_text(json.dumps({**how, **figures}))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except UserError as error:
        sys.exit(f"error: {error}")
