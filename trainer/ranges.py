"""Annotations of settings that say more than a type: `Annotated[int, AtLeast(1)]`. `check` judges them.

They are read from the constructors that the configuration reaches, before anything is built; who calls a
constructor directly is not judged. Infinity and "not a number" fit no annotation but `Any`.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from trainer.errors import UserError


class Rule(ABC):
    """What a value of the right type must keep to; its `words` follow the type in a message."""

    words: Any

    @abstractmethod
    def fits(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Bound(Rule):
    """For numbers, by how they stand to `bound`."""

    holds: Callable[[Any, float], bool]
    relation: str
    bound: float

    @property
    def words(self) -> str:
        return f"{self.relation} {self.bound}"

    def fits(self, value: Any) -> bool:
        return self.holds(value, self.bound)


AtLeast = partial(Bound, operator.ge, "of at least")
AtMost = partial(Bound, operator.le, "of at most")
Above = partial(Bound, operator.gt, "above")
Below = partial(Bound, operator.lt, "below")


@dataclass(frozen=True)
class Filled(Rule):
    """For lists and texts."""

    words = "that is not empty"

    def fits(self, value: Any) -> bool:
        return len(value) > 0


@dataclass(frozen=True)
class Distinct(Rule):
    """For lists."""

    words = "without repetition"

    def fits(self, value: Any) -> bool:
        return all(each not in value[:place] for place, each in enumerate(value))


@dataclass(frozen=True)
class Like(Rule):
    """For texts: all of it matches `pattern`, which people know as `words`."""

    pattern: str
    words: str

    def fits(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Gives:
    """On what takes a `_partial_` node: the arguments that its reader hands over. The node has the others."""

    names: tuple[str, ...]


Count = Annotated[int, AtLeast(1)]
Amount = Annotated[int, AtLeast(0)]
SequenceLength = Annotated[int, AtLeast(2)]  # something is given, something comes
Seed = Annotated[int, AtLeast(0), Below(1 << 63)]
Positive = Annotated[float, Above(0)]
NotNegative = Annotated[float, AtLeast(0)]
Share = Annotated[float, AtLeast(0), AtMost(1)]
Layers = Annotated[list[Amount], Filled(), Distinct()]  # ids in the convention of `records`
Text = Annotated[str, Filled()]
Url = Annotated[str, Like(r"https?://[^\s/]+\S*", "like http://host:port")]
Device = Annotated[str, Like(r"cpu|cuda(:\d+)?", "that is cpu, cuda or cuda:NUMBER")]
Dtype = Literal["bfloat16", "float16", "float32"]


def require_device(device: str, key: str) -> None:
    """Raises UserError unless PyTorch has `device` on this machine."""
    import torch

    count = torch.cuda.device_count()
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        raise UserError(f"{key}={device}, but PyTorch finds {count or 'no'} CUDA or ROCm devices here; set "
                        "hardware=cpu, or install a PyTorch that fits the device")
