"""A Triton backend called `cpu` that compiles nothing, for vLLM's CPU build.

vLLM has some methods in its Model Runner V2 alone, whose kernels are written in Triton, and takes Triton for
usable on a CPU when there is a backend of this name. With TRITON_INTERPRET=1 every kernel is then walked
through by Triton's own interpreter: slowly, and with the numbers that a device would give.

A server finds this folder by entry points under a name of its own (`engines/vllm_installation.py`), beside
neither `trainer` nor its packages. Imports triton only, and nothing of the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any


def register() -> None:
    """vLLM calls this in each process of a server, in some of them twice."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name in ("create_masked_load", "create_masked_store"):
        call = getattr(InterpreterBuilder, name)
        if not hasattr(call, "__wrapped__"):
            setattr(InterpreterBuilder, name, with_bool_mask(call))


def with_bool_mask(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same with its mask cast to bool: one that was made of a Python number has another type, which the
    interpreter refuses, and compiled code does not."""
    place = list(signature(call).parameters).index("mask")

    @wraps(call)
    def cast(*given: Any) -> Any:
        given[place].data = given[place].data.astype(bool, copy=False)
        return call(*given)

    return cast
