"""What `interpreted.Interpreter` starts: answers about Triton kernels, pickled on stdin and stdout."""

from __future__ import annotations

import collections
import pickle
import sys
import traceback
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from trainer.kernels import triton_parts, verify_triton
from trainer.kernels.select import verify as chosen
from trainer.kernels.verification import Verification, Verified


class Patched:
    """Triton's language as the interpreter needs it, patched once for each module and never back: doing it
    for every call takes most of the time."""

    modules: set[int] = set()
    patch = staticmethod(interpreter._patch_lang)

    def __init__(self, function: Any) -> None:
        if id(function.__globals__) not in self.modules:
            self.modules.add(id(function.__globals__))
            self.patch(function)

    def restore(self) -> None:
        """Left as it is."""


convert = interpreter._convert_float


def exactly(given: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The bits of `given` in the target's type. The interpreter's own way takes subnormal bfloat16 numbers
    for others, and is slower."""
    given = np.asarray(given)
    if source == tl.bfloat16 and target == tl.float32:
        return given.view(np.uint16).astype(np.uint32) << 16
    if source == tl.float32 and target == tl.bfloat16:
        numbers = torch.from_numpy(given.view(np.float32).reshape(-1).copy()).bfloat16()
        return numbers.view(torch.uint16).numpy().reshape(given.shape)
    return convert(given, source, target, rounding)


def verify(step: Verification) -> Verified:
    return chosen("triton")(step)


def verify_several(steps: list[Verification], requests: int, longest: int, programs: int | None, **asked: bool
                   ) -> list[Verified]:
    """With one workspace, and many programs for each row."""
    first = steps[0]
    verifier = verify_triton.Verifier(requests, longest, first.vocab_size, first.target_logits.dtype,
                                      first.target_logits.device, programs=programs, **asked)
    answers = []
    for step in steps:
        done = verifier(step)
        answers.append(Verified(done.tokens.clone(), done.counts.clone()))
    return answers


@triton.jit
def number_kernel(seed, position, stream, turn, found, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    drawn = triton_parts.uniform(tl.load(seed), tl.load(position + place), stream, tl.load(turn + place))
    tl.store(found + place, drawn)


def uniform(seed: int, position: Tensor, stream: int, turn: Tensor) -> Tensor:
    found = torch.empty(len(position), dtype=torch.float64)
    number_kernel[(1,)](torch.tensor([seed]), position, stream, turn, found, len(position))
    return found


@triton.jit
def key_kernel(values, keys, back, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    key = triton_parts.key_of(tl.load(values + place))
    tl.store(keys + place, key)
    tl.store(back + place, triton_parts.value_of(key))


def keys(values: Tensor) -> tuple[Tensor, Tensor]:
    """Those of float32 values, and the values of the keys."""
    found, back = torch.empty(len(values), dtype=torch.int32), torch.empty_like(values)
    key_kernel[(1,)](values, found, back, len(values))
    return found, back


def traffic(step: Verification, longest: int, programs: int | None, **asked: bool
            ) -> tuple[int, dict[str, int], dict[str, int], Verified]:
    """Launches of a step, the bytes loaded from and stored to each tensor, and what came of it."""
    verifier = verify_triton.Verifier(len(step.starts) - 1, longest, step.vocab_size,
                                      step.target_logits.dtype, step.target_logits.device, programs=programs,
                                      **asked)
    tensors = {name: value for launch in verifier.launches(step) for name, value in launch.arguments.items()
               if isinstance(value, Tensor)}
    ranges = {name: (each.data_ptr(), each.data_ptr() + each.untyped_storage().nbytes())
              for name, each in tensors.items() if each.numel()}
    loads: dict[str, int] = collections.Counter()
    stores: dict[str, int] = collections.Counter()
    builder, launches = interpreter.InterpreterBuilder, 0

    def counted(name: str, into: dict[str, int], mask_at: int) -> Any:
        call = getattr(builder, name)

        def counting(*given: Any) -> Any:
            places = np.broadcast_arrays(given[1].data, given[mask_at].data)
            moved = places[0][places[1].astype(bool)]
            if len(moved):
                owner = next(name for name, (start, end) in ranges.items() if start <= moved.min() < end)
                into[owner] += len(moved) * given[1].get_element_ty().primitive_bitwidth // 8
            return call(*given)

        setattr(builder, name, counting)
        return lambda: setattr(builder, name, call)

    run = interpreter.GridExecutor.__call__

    def launching(*given: Any, **named: Any) -> Any:
        nonlocal launches
        launches += 1
        return run(*given, **named)

    undo = [counted("create_masked_load", loads, 2), counted("create_masked_store", stores, 3)]
    interpreter.GridExecutor.__call__ = launching
    try:
        done = verifier(step)
    finally:
        interpreter.GridExecutor.__call__ = run
        for each in undo:
            each()
    return launches, dict(loads), dict(stores), done


def main() -> None:
    interpreter._patch_lang, interpreter._convert_float = Patched, exactly
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    torch.set_num_threads(1)
    while True:
        try:
            function, given, named = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = False, globals()[function](*given, **named)
        except Exception:  # noqa: BLE001 - the tests' process tells it
            answer = True, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
