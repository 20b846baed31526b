"""The backend that stands in for Triton's compiler on a CPU. Served drafters (tests/vllm) run all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.kernels.triton_interpreter import with_bool_mask


def store(builder: Any, place: Any, value: Any, mask: Any, policy: str = "") -> tuple[Any, ...]:
    return builder, place, value, mask.data, policy


@pytest.mark.parametrize("mask", [np.array([1, 0, 2], np.int32), np.array([True, False, True])])
def test_a_mask_of_any_kind_becomes_bool_and_nothing_else_changes(mask: np.ndarray) -> None:
    builder, place, value, found, policy = with_bool_mask(store)("b", "p", 3, SimpleNamespace(data=mask), "x")
    assert (builder, place, value, policy) == ("b", "p", 3, "x")
    assert found.dtype == bool and found.tolist() == [True, False, True]


def test_what_was_wrapped_can_be_told() -> None:
    """vLLM registers its plugins more than once in a process."""
    assert with_bool_mask(store).__wrapped__ is store
