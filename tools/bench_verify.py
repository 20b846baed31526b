"""Measures one step of verification, vLLM's own code and fused verification in turns, within one run.

    python tools/bench_verify.py [--vocabulary 49152 151936] [--requests 1 16 64] [--json FILE]
    python tools/bench_verify.py --gpu [--json FILE]

Both arms get the same logits, drafts and sampling, in vLLM's own records: `vllm` is the rejection sampler of
Model Runner V1, `fused` what the plugin puts in its place, from those records to the tokens. A draft is the
target's most likely token with `--accept`, as a drafter's would be, so that requests stop at different rows.
Goal: `fused` is faster in every cell. Greedy tokens of both must be the same.

`--gpu` measures on CUDA or ROCm, against the kernels of the vLLM that is installed there: time of a step of
256 requests (goals G12 and G13: three quarters of what a copy moves, 6 times V1, 4 times V2, and no more than
1.1 times the bytes that have to be read), and launches, waits and capture by a graph (G14).

The interpreter is that of engine.python (--python); what is measured runs inside it. Each round times every
arm once, and the order of the arms changes from round to round; a ratio is taken within a round. Medians,
least and most are shown. Exit status 1 when a goal is missed and --assert was given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from trainer.engines.vllm_installation import find_installation  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

INSIDE = Path(__file__).with_name("verify_arms.py")
WAYS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7},
        "top-k 20, top-p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95}}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM's interpreter finds; its own words go to the screen."""
    found = find_installation(options.python)
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:options.threads])
    variables = found.environment(cores, kv_cache_gib=1) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    variables |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": str(options.threads)}
    request = {name: getattr(options, name) for name in (
        "vocabulary", "requests", "k", "accept", "rounds", "threads", "dtype", "gpu")}
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        out = Path(folder, "figures.json")
        done = subprocess.run([found.python, str(INSIDE), json.dumps(request | {"ways": WAYS}), str(out)],
                              env=variables, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(lines[-1].removeprefix("error: "))
        return {"vllm": found.version, **json.loads(out.read_text())}


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def three(figure: dict[str, float], scale: float = 1) -> str:
        return " ".join([f"{scale * figure['median']:.3g}",
                         f"({scale * figure['least']:.3g} .. {scale * figure['most']:.3g})"])

    arms = list(found["cells"][0]["seconds"])
    table = Table("vocabulary", "requests", "sampling", *(f"{arm}, ms" for arm in arms),
                  *(f"{arm} / fused" for arm in arms if arm != "fused"), "tokens a request")
    for cell in found["cells"]:
        table.add_row(f"{cell['vocabulary']}", f"{cell['requests']}", cell["sampling"],
                      *(three(cell["seconds"][arm], 1000) for arm in arms),
                      *(three(cell["ratios"][arm]) for arm in arms if arm != "fused"),
                      f"{cell['emitted']:.2f}")
    Console(width=150).print(table)
    for each in found["goals"]:
        print(f"goal {'met' if each['met'] else 'missed'}: {each['what']} {each['found']:.3g}, "
              f"{each['wanted']} was wanted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on CUDA or ROCm, goals G12 to G14")
    parser.add_argument("--python", default="auto", help="as engine.python (default auto)")
    parser.add_argument("--vocabulary", type=int, nargs="+", help="default 49152 151936; 151936 on a GPU")
    parser.add_argument("--requests", type=int, nargs="+", help="default 1 16 64; 1 16 256 on a GPU")
    parser.add_argument("--k", type=int, default=7, help="drafts of a request (default 7)")
    parser.add_argument("--accept", type=float, default=0.7, help="chance of a draft to be accepted (0.7)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                        help="of the logits")
    parser.add_argument("--rounds", type=int, help="measured rounds (default 7; 200 on a GPU)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--assert", action="store_true", dest="strict", help="fail when a goal is missed")
    options = parser.parse_args()
    options.vocabulary = options.vocabulary or ([151936] if options.gpu else [49152, 151936])
    options.requests = options.requests or ([1, 16, 256] if options.gpu else [1, 16, 64])
    options.rounds = options.rounds or (200 if options.gpu else 7)
    found = measure(options)
    show(found)
    if options.json:
        found["machine"]["command"] = [Path(sys.argv[0]).name, *sys.argv[1:]]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(options.strict and not all(each["met"] for each in found["goals"]))


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=True))
