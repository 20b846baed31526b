"""The command line that serves a target, with or without a drafter. It is put together here alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.cpu_build import CpuServer

Place = Path | str  # a folder, or a name on the Hub
FUSED = {"TRAINER_FUSED_VERIFY": 1}  # of a server whose environment has `trainer.vllm_plugin`
SCHEDULE = "num_speculative_tokens_per_batch_size"


def speculation(method: str, drafter: Place | None, lengths: Mapping[str, Any]) -> dict[str, Any]:
    """What `--speculative-config` takes; `drafter` None: the target has it inside; `lengths` as
    `draft_lengths` gives them."""
    return {"method": method, **({} if drafter is None else {"model": str(drafter)}), **lengths}


def draft_lengths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `--speculative-config` for these facts: a server drafts up to the first of them, so that is
    the longest of a schedule. One that is the same for every batch says no more than the length alone, and
    costs full graphs in vLLM's older runner, so it is left out."""
    schedule = facts.get(SCHEDULE) or []
    lengths = {k for _, _, k in schedule}
    if len(lengths) < 2:
        return {"num_speculative_tokens": facts["default_k"]}
    return {"num_speculative_tokens": max(lengths), SCHEDULE: schedule}


def cpu_server(facts: Mapping[str, Any]) -> CpuServer | None:
    """How a build for CPUs serves the drafter with these facts; None where none does, or they are older."""
    return CpuServer(**facts["cpu_server"]) if "cpu_server" in facts else None


def serve_line(model: Place, draft: Mapping[str, Any] | None = None, flags: Mapping[str, Any] = {},
               variables: Mapping[str, Any] = {}, program: str = "vllm") -> str:
    """One line for a shell: environment variables, `vllm serve`, `flags` by their names without dashes (true:
    the flag alone; null: without it), and `draft` as `--speculative-config`."""
    words = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items() if value is not None]
    words += [shlex.quote(program), "serve", shlex.quote(str(model))]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", *([] if value is True else [shlex.quote(str(value))])]
    if draft is not None:
        words += ["--speculative-config", shlex.quote(json.dumps(draft))]
    return " ".join(words)


def sglang_line(model: Place, method: str, drafter: Place, k: int) -> str:
    """One line for a shell that has SGLang serve the target with a drafter; blocks say their length
    themselves."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", shlex.quote(str(model)),
             "--speculative-algorithm", method.upper(), "--speculative-draft-model-path",
             shlex.quote(str(drafter))]
    if method == "eagle3":
        words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1",
                  "--speculative-num-draft-tokens", str(k + 1)]
    return " ".join(words)
