"""Tensors of a file against those that are expected: what is told, and what is as good."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.architectures.tensors import FLOATS, differences

WANTED = {"a": torch.zeros(2, 3), "order": torch.arange(4), "more": torch.zeros(1)}
NAN, INF = torch.full((2, 3), torch.nan), torch.full((2, 3), torch.inf)


@pytest.mark.parametrize(("changes", "told"), [
    *[({"a": torch.ones(2, 3, dtype=dtype)}, []) for dtype in FLOATS],
    ({"order": torch.arange(4, dtype=torch.int32)}, []),
    ({"a": None}, ["a: expected [2, 3], found none"]),
    ({"b": torch.zeros(2)}, ["b: expected none, found [2]"]),
    ({"a": torch.zeros(3, 2)}, ["a: expected [2, 3], found [3, 2]"]),
    ({"a": torch.zeros(2, 3, dtype=torch.int8)}, ["a: expected [2, 3], found [2, 3] of int8"]),
    ({"a": torch.zeros(2, 3, dtype=torch.bool)}, ["a: expected [2, 3], found [2, 3] of bool"]),
    ({"a": torch.zeros(2, 3).to(torch.float8_e4m3fn)}, ["a: expected [2, 3], found [2, 3] of float8_e4m3fn"]),
    ({"order": torch.zeros(4)}, ["order: expected [4] of int64, found [4]"]),
    ({"a": NAN, "order": None}, ["a: expected finite numbers, found others",
                                 "order: expected [4] of int64, found none"]),
    ({"a": INF.half()}, ["a: expected finite numbers, found others"]),
    ({"a": INF.to("meta")}, [])])
def test_what_differs_is_told(changes: dict[str, Tensor | None], told: list[str]) -> None:
    given = {**WANTED, "more": None, **changes}
    found = {name: tensor for name, tensor in given.items() if tensor is not None}
    assert differences(WANTED, found, optional=["more"]) == told
    assert "more: expected [1], found none" in differences(WANTED, found)
