"""What the Triton kernels of verification take of a device, of AMD and of NVIDIA, without one.

    python tools/inspect_kernels.py
    python tools/inspect_kernels.py --target gfx942 --kernel emit
    python tools/inspect_kernels.py --json

Compiles every kernel as a step of a vocabulary of 151 936 ids launches it, for each type of logits and each
kind of step. A row says registers of a thread, what of them was spilled (AMD: registers, vector and scalar;
NVIDIA: bytes), bytes of scratch memory of a thread and of shared memory of a program. Exit status: 0, or 1
when something is spilled or in scratch memory, or a kernel that reads rows of logits loads less than 16 bytes
at once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from trainer.kernels.verification import DraftDistribution, Sampling, Verification  # noqa: E402
from trainer.kernels.verify_triton import Launch, Verifier  # noqa: E402
from trainer.progress import exit_status  # noqa: E402

TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
           "sm_90": GPUTarget("cuda", 90, 32)}
FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES = FLOATS | {torch.int64: "i64", torch.int32: "i32"}
VOCABULARY, DRAFT_VOCABULARY, REQUESTS, LONGEST = 151_936, 32_000, 4, 8


@dataclass(frozen=True)
class Found:
    """What a compiled kernel takes; `wide` says whether it loads 16 bytes at once, None if it has no need,
    `scalar` how many of the spills are AMD's scalar registers, which go to vector registers, not memory."""

    kernel: str
    target: str
    vgpr: int
    spills: int
    scratch: int
    lds: int
    wide: bool | None
    scalar: int = 0

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("wide", "scalar")}

    def problem(self) -> str | None:
        told = [f"{self.spills} spilled"] * (self.spills > 0) + [f"{self.scratch} B of scratch"] * (
            self.scratch > 0) + ["no load of 16 bytes"] * (self.wide is False)
        return f"{self.kernel} on {self.target}: {', '.join(told)}" if told else None


def step(dtype: torch.dtype, drawn: str | None, block: bool) -> Verification:
    """A step whose tensors hold nothing; `drawn` is None, "full" or "reduced"."""
    rows = REQUESTS * LONGEST

    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    how = Sampling(empty(REQUESTS), empty(REQUESTS, of=torch.int32), empty(REQUESTS), empty(REQUESTS),
                   empty(REQUESTS, of=torch.int64), empty(REQUESTS, of=torch.int64))
    distribution = None
    if drawn:
        size = VOCABULARY if drawn == "full" else DRAFT_VOCABULARY
        ids = (empty(size, of=torch.int64), empty(VOCABULARY, of=torch.int32)) if drawn == "reduced" else ()
        distribution = DraftDistribution(empty(rows, size, of=dtype), empty(REQUESTS), empty(rows),
                                         empty(rows), *ids)
    return Verification(empty(rows, VOCABULARY, of=dtype), empty(REQUESTS + 1, of=torch.int32),
                        empty(rows, of=torch.int64), how, VOCABULARY, distribution, block)


def variants(types: tuple[torch.dtype, ...]) -> Iterator[tuple[str, Launch]]:
    """Every kernel with a name, each once."""
    kinds = [("greedy", {"sampled": False, "filters": False}, None, False),
             ("plain", {"filters": False}, None, False), ("filters", {}, None, False)]
    kinds += [(f"{drawn or 'one-hot'} {'block' if block else 'one by one'}", {}, drawn, block)
              for drawn in (None, "full", "reduced") for block in (False, True)]
    seen = set()
    for dtype in types:
        for kind, asked, drawn, block in kinds:
            verifier = Verifier(REQUESTS, LONGEST, VOCABULARY, dtype, torch.device("meta"), **asked)
            for launch in verifier.launches(step(dtype, drawn, block)):
                source = source_of(launch, "gfx942")
                parts = (launch.kernel.__name__, *sorted(source.signature.items()), *sorted(
                    (place, str(value)) for place, value in source.constants.items()))
                if parts not in seen:
                    seen.add(parts)
                    yield f"{launch.kernel.__name__} {kind} {TYPES[dtype]}", launch


def source_of(launch: Launch, target: str) -> ASTSource:
    """The kernel with the types that its arguments have and what Triton makes of their values at a launch:
    what divides them and, for AMD, that tensors are below 2 GB."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        else:
            signature[parameter.name] = "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
        if isinstance(value, Tensor) and target.startswith("gfx"):
            attributes[(place,)].append(["tt.pointer_range", 32])
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(name: str, launch: Launch, target: str) -> Found:
    kernel = triton.compile(source_of(launch, target), target=TARGETS[target],
                            options={"num_warps": launch.waves})
    text = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    wide = bool(re.search(r"(global|buffer)_load_dwordx4|ld\.global\S*\.v4\.b32", text)) \
        if reads_rows(launch) else None
    if target.startswith("gfx"):
        numbers = {each: int(re.search(rf"\.{each}:\s*(\d+)", text)[1])
                   for each in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count",
                                "private_segment_fixed_size")}
        return Found(name, target, numbers["vgpr_count"],
                     numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
                     numbers["private_segment_fixed_size"], kernel.metadata.shared, wide,
                     numbers["sgpr_spill_count"])
    said = assembled(text, target)
    return Found(name, target, int(re.search(r"Used (\d+) registers", said)[1]),
                 sum(map(int, re.findall(r"(\d+) bytes spill", said))),
                 int(re.search(r"(\d+) bytes stack frame", said)[1]), kernel.metadata.shared, wide)


def reads_rows(launch: Launch) -> bool:
    """All do but those that decide by notes alone."""
    return "logits" in launch.arguments and not (
        launch.kernel.__name__ == "note_rows" and launch.arguments["cells"] is None)


def assembled(text: str, target: str) -> str:
    """What NVIDIA's assembler, which comes with Triton, says of PTX."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [assembler, "-v", f"--gpu-name={target}a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def inspect(targets: list[str], types: tuple[torch.dtype, ...], only: str = "") -> Iterator[Found]:
    for name, launch in variants(types):
        if only in name:
            for target in targets:
                yield compiled(name, launch, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append", help="one of them; all if not given")
    parser.add_argument("--kernel", default="", help="only names that hold this")
    parser.add_argument("--type", choices=FLOATS.values(), action="append", help="of the logits; all")
    parser.add_argument("--json", action="store_true", help="one list, each kernel an object, alone")
    given = parser.parse_args()
    types = tuple(each for each, name in FLOATS.items() if name in (given.type or [name]))
    found = list(inspect(given.target or list(TARGETS), types, given.kernel))
    if given.json:
        print(json.dumps([each.row() for each in found], indent=1))
    else:
        table = Table("kernel", "target", "vgpr", "spills", "scratch", "lds", box=None)
        for each in found:
            table.add_row(*map(str, each.row().values()))
        Console(width=120).print(table)
    wrong = [told for each in found if (told := each.problem())]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
