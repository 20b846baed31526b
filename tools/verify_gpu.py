"""A part of tools/bench_verify.py and no command: goals G12 to G14 on a CUDA or ROCm device.

Three arms: `v1`, the rejection sampler of vLLM's Model Runner V1; `v2`, the kernels that Model Runner V2 runs
for the same step, its float32 copy, temperature and filters included, in the portions that it takes; `fused`,
our kernel. Each is replayed as a graph where it can be captured, timed by events of the device, with caches
filled by something else before every time. Bytes are not counted but bounded: no more can have moved than the
device copies in the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from turns import Call, in_turns, spread
from verify_arms import Case, cases, cell, v1_arms

from trainer.kernels.verification import DraftDistribution, Sampling, Verification
from trainer.vllm_plugin.fused import Fused, Verify

FLUSH = 2 ** 29  # bytes, more than any cache of these devices
MOST_LAUNCHES = {"greedy": 2}
ANY_LAUNCHES = 3
SHARE, FAILED = 1.1, 1.5  # of the bytes that have to be read
OVER_V1, OVER_V2, OF_PEAK = 6.0, 4.0, 0.75


def drawn_from(case: Case) -> tuple[Case, DraftDistribution]:
    """The case with drafts that were drawn from a distribution beside the target's."""
    requests, k = case.drafts.shape
    draw = torch.Generator(device=case.logits.device).manual_seed(1)
    logits = case.logits.clone()
    drafts = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    lse = torch.zeros(len(logits), device=logits.device)
    for row in range(len(logits)):  # one at a time: float32 for all of them would be the most of the memory
        noise = torch.randn(logits.shape[1], generator=draw, device=logits.device) / 4
        logits[row] += noise.to(logits.dtype)
        scaled = logits[row].float() / case.temperature
        lse[row] = scaled.logsumexp(0)
        drafts[row] = torch.multinomial(scaled.softmax(0), 1, generator=draw)[0]
    temperature = torch.full((requests,), case.temperature, device=logits.device)
    drawn = DraftDistribution(logits, temperature, lse, logits.gather(1, drafts[:, None])[:, 0].float())
    return replace(case, drafts=drafts.view(requests, k + 1)[:, :k].contiguous()), drawn


def step_of(case: Case, drawn: DraftDistribution | None) -> Verification:
    requests, k = case.drafts.shape
    device = case.logits.device
    same = torch.ones(requests, device=device)
    sampling = Sampling(same * case.temperature, (same * case.top_k).int(), same * case.top_p, same * 0,
                        torch.arange(requests, device=device), torch.full_like(same, 100).long())
    drafts = torch.nn.functional.pad(case.drafts, (0, 1), value=-1).flatten()
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * (k + 1)
    return Verification(case.logits, starts, drafts, sampling, case.logits.shape[1], drawn)


def v2_arm(case: Case, drawn: DraftDistribution | None) -> Call:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    (requests, k), device = case.drafts.shape, case.logits.device
    portion = max(1, get_max_chunk_logits(case.logits.shape[1]) // (k + 1))
    own = torch.nn.functional.pad(case.drafts, (1, 0)).flatten().int()  # a row's own token
    local = torch.arange(k + 1, dtype=torch.int32, device=device).repeat(requests)
    position = torch.arange(len(own), device=device)
    every = torch.arange(requests, device=device)
    request = every.repeat_interleave(k + 1)
    temperature = torch.full((requests,), case.temperature, device=device)
    top_k = torch.full_like(request, case.top_k or case.logits.shape[1]).int()
    top_p = torch.full((len(own),), case.top_p, device=device)
    drafter = None if drawn is None else drawn.logits.view(requests, k + 1, -1)[:, :k].contiguous()

    def verified(start: int, end: int) -> tuple[Tensor, Tensor]:
        rows = slice(start * (k + 1), end * (k + 1))
        logits = case.logits[rows]
        if case.temperature not in (0, 1) or case.top_k or case.top_p < 1:
            logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
            apply_temperature(logits, request[rows], temperature)
            if case.top_k or case.top_p < 1:
                logits = apply_top_k_top_p(logits, top_k[rows] if case.top_k else None,
                                           top_p[rows] if case.top_p < 1 else None)
        starts = torch.arange(end - start + 1, dtype=torch.int32, device=device) * (k + 1)
        return rejection_sample(logits, drafter, own[rows], starts, position[rows], every[start:end],
                                request[rows], local[rows], temperature, every, k)

    def call() -> Tensor:
        parts = [verified(start, min(start + portion, requests)) for start in range(0, requests, portion)]
        tokens, counts = (torch.cat(each) for each in zip(*parts, strict=True))
        place = torch.arange(k + 1, device=device)
        return tokens.masked_fill(place >= counts[:, None], -1)

    return call


def captured(call: Call) -> tuple[Call, bool]:
    """A replay of the call, and True; the call itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiled and tuned before
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def by_events(call: Call, flush: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def copied_per_second(flush: Tensor, rounds: int) -> float:
    """Bytes read and written by a copy within the device."""
    source, place = (torch.empty(2 ** 30, dtype=torch.uint8, device=flush.device) for _ in range(2))
    times = [by_events(lambda: place.copy_(source), flush) for _ in range(rounds)]
    return 2 * len(source) / spread(times)["median"]


def launches(call: Call) -> int:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def waits(call: Call) -> bool:
    """Whether the host waits for the device inside the call."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def measure(request: dict[str, Any], verify: Verify) -> dict[str, Any]:
    import logging

    device = torch.device("cuda")
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    per_second = copied_per_second(flush, 20)
    fused, found, goals = Fused(verify, logging.getLogger(__name__)), [], []
    for name, case in cases(request, device):
        forms: dict[str, tuple[Case, DraftDistribution | None]] = {name: (case, None)}
        if name == "sampled":
            forms["sampled, drawn drafts"] = drawn_from(case)
        for form, (own, drawn) in forms.items():
            step = step_of(own, drawn)
            calls: dict[str, Call] = {"v2": v2_arm(own, drawn),
                                      "fused": lambda step=step: verify(step).tokens}
            if drawn is None:
                calls = {"v1": v1_arms(own, fused)["vllm"], **calls}
            replays = {arm: captured(call) for arm, call in calls.items()}
            seconds = in_turns({arm: call for arm, (call, _) in replays.items()}, request["rounds"],
                               lambda call: by_events(call, flush))
            row = cell(own, form, calls, seconds)
            row |= {"captured": {arm: whole for arm, (_, whole) in replays.items()},
                    "launches": launches(calls["fused"]), "waits": waits(calls["fused"]),
                    "bytes_at_most": row["seconds"]["fused"]["median"] * per_second}
            found.append(row)
            goals += goals_of(row, request["k"], per_second, drawn is not None)
    return {"what": torch.cuda.get_device_name(), "bytes_per_second": per_second, "cells": found,
            "goals": goals}


def goals_of(row: dict[str, Any], k: int, per_second: float, drawn: bool) -> list[dict[str, Any]]:
    """G12 and G13 for the largest batch of sampled requests, G14 for all."""
    what = f"{row['requests']} requests, {row['sampling']}"
    most = MOST_LAUNCHES.get(row["sampling"], ANY_LAUNCHES)
    goals = [{"what": f"G14 {what}: launches", "found": row["launches"], "wanted": f"{most} or fewer",
              "met": row["launches"] <= most},
             {"what": f"G14 {what}: waits of the host", "found": int(row["waits"]), "wanted": "none",
              "met": not row["waits"]},
             {"what": f"G14 {what}: captured by a graph", "found": int(row["captured"]["fused"]),
              "wanted": "1", "met": row["captured"]["fused"]}]
    if row["requests"] < 256 or not row["sampling"].startswith("sampled"):
        return goals
    rows = 2 * (k + 1) + (2 if drawn else 0)  # bf16: each target row, and one of the drafter's where refused
    floor = rows * row["vocabulary"] * row["requests"]
    bound = row["bytes_at_most"] / floor
    goals.append({"what": f"G12 {what}: bytes over those to read, at most", "found": bound,
                  "wanted": f"{SHARE} or less ({FAILED} is a failure)", "met": bound <= SHARE})
    share = floor / row["seconds"]["fused"]["median"] / per_second
    goals.append({"what": f"G13 {what}: share of what a copy moves", "found": share,
                  "wanted": f"{OF_PEAK} or more", "met": share >= OF_PEAK})
    for arm, least in (("v1", OVER_V1), ("v2", OVER_V2)):
        if arm in row["ratios"]:
            ratio = row["ratios"][arm]["median"]
            goals.append({"what": f"G13 {what}: {arm} / fused", "found": ratio, "wanted": f"{least} or more",
                          "met": ratio >= least})
    return goals
