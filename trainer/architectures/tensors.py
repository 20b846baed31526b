"""Whether tensors that came from a file are those that were expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)


def differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor],
                optional: Collection[str] = ()) -> list[str]:
    """A text for each tensor that is not as it is `wanted`, or that is missing and not `optional`: its name,
    what was expected and what was found. They differ in name, in shape, in the kind of their numbers
    (quantised weights are codes in the place of values), or as they are not finite; any floating dtype of
    FLOATS is as good as another. Nothing of `wanted` but shapes and dtypes is read, and tensors on the device
    meta have no values to judge."""
    names = sorted(found.keys() | (wanted.keys() - {*optional}))
    pairs = {name: _difference(wanted.get(name), found.get(name)) for name in names}
    return [f"{name}: {text}" for name, text in pairs.items() if text]


def _difference(wanted: Tensor | None, found: Tensor | None) -> str | None:
    if wanted is None or found is None or wanted.shape != found.shape \
            or found.dtype not in (FLOATS if wanted.is_floating_point() else INTEGERS):
        return f"expected {_shown(wanted)}, found {_shown(found)}"
    if found.is_floating_point() and not found.is_meta and not bool(found.isfinite().all()):
        return "expected finite numbers, found others"
    return None


def _shown(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    kind = "" if tensor.dtype in FLOATS else f" of {str(tensor.dtype).removeprefix('torch.')}"
    return f"{list(tensor.shape)}{kind}"
