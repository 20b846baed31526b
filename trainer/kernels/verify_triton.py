"""Verification on a CUDA or ROCm device: the function of `verify_reference`, in kernels written in Triton.

Greedy requests take two launches, others three, with every filter and either way of verifying. The target's
logits are read once, in the head's type, and nothing of their size is written. A `Verifier` does not wait for
the device, and what it launches does not depend on what the tensors hold, so that a graph can capture it
once it has run. Triton's interpreter runs the same kernels on a CPU; no device has run them yet. """

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from trainer.kernels.triton_emit import emit, emit_best
from trainer.kernels.triton_parts import BLOCK, CELL, KEPT, RECORD
from trainer.kernels.triton_rows import best_of_blocks, note_blocks, note_rows
from trainer.kernels.verification import Verification, Verified

READERS = 16  # programs of one wave that read rows, for each of the device's processors
RESIDUALS = 4  # larger ones that read what is left of a row


@dataclass(frozen=True)
class Launch:
    """One kernel of a step: its grid, its arguments by name and how many waves a program has."""

    kernel: Callable[..., Any]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    waves: int

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.waves)


def verify(step: Verification) -> Verified:
    """See the records. Values are not checked. This looks at some of them to take no more memory and no more
    kernels than they need, for which it waits; a `Verifier` does not."""
    _check_device(step.target_logits.device)
    how = step.sampling
    sampled = how.temperature > 0
    filters = sampled & ((how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0))
    longest, some, filtered = torch.stack([step.starts.diff().max(), sampled.any(), filters.any()]).tolist()
    return Verifier(len(step.starts) - 1, longest, step.vocab_size, step.target_logits.dtype,
                    step.target_logits.device, sampled=bool(some), filters=bool(filtered))(step)


class Verifier:
    """`verify` with a workspace: for steps of at most so many requests of at most `longest` rows each,
    further rows of a request are not looked at. What comes back is overwritten by the next step.

    `sampled` and `filters` say what the requests may ask for: without the first all are greedy, without the
    second none that samples has top-k, top-p or min-p; what is not said is not looked at either. `programs`
    share a row: chosen by the device for None, the answer does not depend on it. """

    def __init__(self, requests: int, longest: int, vocab_size: int, dtype: torch.dtype, device: torch.device,
                 *, sampled: bool = True, filters: bool = True, programs: int | None = None) -> None:
        rows, self.blocks = requests * longest, triton.cdiv(vocab_size, BLOCK.value)
        self.requests, self.longest, self.vocab_size = requests, longest, vocab_size
        self.dtype, self.device, self.sampled = dtype, device, sampled
        self.filters, self.programs = filters and sampled, programs
        self.table = triton.next_power_of_2(self.blocks)  # kernels work with powers of two
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count \
            if device.type == "cuda" else 1

        def room(*shape: int, of: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        self.tokens, self.counts = room(requests, longest, of=torch.int64), room(requests, of=torch.int32)
        self.best = room(0 if sampled else rows * self.blocks, of=torch.int64)
        self.notes = room(rows if sampled else 0, 3 * self.table + RECORD.value, of=torch.float32)
        self.arrivals = room(requests, of=torch.int32)
        cells = self.blocks * (BLOCK.value // CELL.value)
        self.cells = room(rows, cells, of=dtype) if self.filters else None
        self.lists = room(rows, cells + 2 * KEPT.value, of=torch.int32) if self.filters else None

    def __call__(self, step: Verification) -> Verified:
        """See the records. Values are not checked; a ValueError says what does not fit the workspace."""
        _check_device(step.target_logits.device)
        for launch in self.launches(step):
            launch.run()
        requests = len(step.starts) - 1
        return Verified(self.tokens[:requests], self.counts[:requests])

    def launches(self, step: Verification) -> list[Launch]:
        """The kernels of a step, in their order."""
        self._check(step)
        requests = len(step.starts) - 1
        rows, logits = (requests, self.longest), step.target_logits
        row = {"logits": logits, "stride": logits.stride(0), "width": logits.shape[1],
               "size": self.vocab_size, "starts": step.starts}
        parts, per = self._parts(READERS, requests * self.longest)
        answer = {"tokens": self.tokens, "counts": self.counts, "longest": self.longest,
                  "LENGTH": triton.next_power_of_2(self.longest + 1)}
        if not self.sampled:
            first = row | {"per": per, "best": self.best}
            last = {"starts": step.starts, "drafts": step.drafts, "best": self.best, "programs": parts,
                    "PROGRAMS": triton.next_power_of_2(parts)} | answer
            return [Launch(best_of_blocks, (*rows, parts), first, 1),
                    Launch(emit_best, (requests,), last, 4)]
        how, drawn = step.sampling, step.distribution
        noted = {"temperature": how.temperature, "notes": self.notes, "BLOCKS": self.table}
        blocks = row | noted | {"per": per, "cells": self.cells}
        totals = row | noted | {"top_k": how.top_k, "top_p": how.top_p, "min_p": how.min_p,
                                "cells": self.cells, "lists": self.lists}
        shared, share = self._parts(RESIDUALS, requests) if drawn else (1, self.blocks)
        drafter = {"drawn_logits": drawn and drawn.logits, "drawn_temperature": drawn and drawn.temperature,
                   "drawn_stride": drawn.logits.stride(0) if drawn else 0,
                   "drawn_lse": drawn and drawn.lse, "drawn_logit": drawn and drawn.drawn_logit,
                   "draft_ids": drawn and drawn.draft_ids, "arrivals": self.arrivals, "per": share}
        last = row | noted | answer | drafter | {"drafts": step.drafts, "seed": how.seed,
                                                 "position": how.position, "BLOCK_WISE": step.block}
        # With these, NVIDIA's assembler puts nothing in memory, and a thread reads 16 bytes at once.
        waves = 4 if self.dtype == torch.float32 and drawn is None else 2
        return [Launch(note_blocks, (*rows, parts), blocks, 1), Launch(note_rows, rows, totals, 8),
                Launch(emit, (requests, shared), last, waves)]

    def _parts(self, each: int, among: int) -> tuple[int, int]:
        """Programs that share the blocks of a row, so that the device is busy, and the blocks of each."""
        wanted = self.programs or triton.cdiv(each * self.processors, among)
        per = triton.cdiv(self.blocks, min(self.blocks, wanted))
        return triton.cdiv(self.blocks, per), per

    def _check(self, step: Verification) -> None:
        requests, logits = len(step.starts) - 1, step.target_logits
        if requests > self.requests:
            raise ValueError(f"the step has {requests} requests; the workspace is for {self.requests}")
        for name, found, expected in (("vocab_size", step.vocab_size, self.vocab_size),
                                      ("target_logits' type", logits.dtype, self.dtype),
                                      ("device", logits.device, self.device)):
            if found != expected:
                raise ValueError(f"the step's {name} is {found}; the workspace is for {expected}")


def problem() -> str | None:
    """Why no kernel can run in this process; None where one can."""
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "no CUDA or ROCm device is found, and TRITON_INTERPRET=1 is not set"


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(f"the logits are on {device}; this path takes those of a CUDA or ROCm device")
