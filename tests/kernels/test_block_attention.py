"""Block attention against a slow loop in float64, and the fused twin against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.kernels import block_attention as flex
from trainer.kernels import reference
from trainer.kernels.select import block_attention


def inputs(seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    anchors, slots, tokens, heads, groups, size = 5, 4, 33, 6, 2, 16
    shapes = ((anchors, slots, heads, size), (tokens, groups, size), (tokens, groups, size),
              (anchors, slots, groups, size), (anchors, slots, groups, size))
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    visible = torch.rand(anchors, tokens, generator=generator) < 0.4
    visible[0] = False  # an anchor at the very beginning sees its own block alone
    return *made, visible


def slow(query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
         visible: Tensor) -> Tensor:
    out = torch.zeros_like(query)
    share = query.shape[2] // context_key.shape[1]
    for anchor in range(query.shape[0]):
        for slot in range(query.shape[1]):
            for head in range(query.shape[2]):
                group = head // share
                keys = torch.cat([context_key[visible[anchor], group], block_key[anchor, :, group]])
                values = torch.cat([context_value[visible[anchor], group], block_value[anchor, :, group]])
                weights = (keys @ query[anchor, slot, head] / query.shape[3] ** 0.5).softmax(0)
                out[anchor, slot, head] = weights @ values
    return out


def test_reference_equals_a_slow_loop_in_float64() -> None:
    made = inputs(0, torch.float64)
    found = reference.block_attention(*(each.float() if each.is_floating_point() else each for each in made))
    torch.testing.assert_close(found.double(), slow(*made), atol=2e-6, rtol=1e-5)


def test_a_block_without_any_context_attends_to_itself() -> None:
    made = [each[:0] if index in (1, 2) else each for index, each in enumerate(inputs(3, torch.float64))]
    made[5] = made[5][:, :0]
    torch.testing.assert_close(reference.block_attention(*made), slow(*made), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", [1, 2])
def test_flex_equals_reference(seed: int) -> None:
    made = inputs(seed, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(flex.block_attention(*made), reference.block_attention(*made),
                                   atol=2e-6, rtol=1e-5)


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(UserError, match="attention=fused"):
        block_attention("fused")
