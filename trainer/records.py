"""Frozen records that cross the seams between rooms. Nothing here computes anything heavy.

Layer ids follow one convention everywhere: id L is the target's residual stream after L decoder layers,
before the final norm; 0 is the embedding output and N (the number of layers) is the state that the final norm
reads. """

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torch import Tensor

from trainer.ranges import Above, Amount, AtMost, Count, Device, NotNegative, Positive, Seed, Share

UNKNOWN = "unknown"  # a language or a thinking mode that nothing says


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered: optional system text and the user's turns, in order.

    `messages` has the whole of it where that is not all: tools are called, answers have reasoning. Then a
    turn is the text of what stands before an answer, and an answer what its message says. `template` goes to
    the chat template beside the target's own arguments: `tools`, the thinking mode of this conversation."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str = "chat"
    language: str = UNKNOWN
    answers: tuple[str, ...] = ()  # given answers, one a turn, for data that brings its own
    messages: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How the target answers. `temperature` 0 is greedy; a request's seed comes from `seed` and its id. The
    `top_k` likeliest tokens are drawn from (0: all), of those none that is less than `min_p` times as likely
    as the first; what was there before is less likely by the `repetition_penalty`, 1 for none."""

    max_new_tokens: Count
    temperature: NotNegative
    top_p: Annotated[float, Above(0), AtMost(1)]
    seed: Seed
    top_k: Amount = 0
    min_p: Share = 0.0
    repetition_penalty: Positive = 1.0


@dataclass(frozen=True)
class Completion:
    """What an engine answered to one list of prompt ids. `finish_reason` is "stop" or "length"."""

    tokens: tuple[int, ...]
    finish_reason: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One row of training data: the ids that the server saw and produced.

    `loss_mask[i]` is True when token i was sampled by the target (the end-of-turn token included).
    """

    id: str
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    category: str = "chat"
    finish_reason: str = "stop"
    language: str = UNKNOWN
    thinking: str = UNKNOWN

    @property
    def supervised(self) -> int:
        return sum(self.loss_mask)

    @property
    def turn(self) -> int:
        """Which answer of its conversation the first one here is, 0 the first of all; ids end in it."""
        _, mark, number = self.id.rpartition("#")
        return int(number) if mark and number.isdecimal() else 0


@dataclass(frozen=True)
class LastState:
    """A tap: the stream after all layers, before the final norm, of every token: [hidden]."""

    def __str__(self) -> str:
        return "the last state of every token"


@dataclass(frozen=True)
class KeysValues:
    """A tap: keys, turned to their positions, and values of the target's last layer of this `kind` of
    attention that has its own: [2 * kv_heads * head_dim], the keys first, for each token."""

    kind: str

    def __str__(self) -> str:
        return f"the keys and values of {self.kind}"


Tap = int | LastState | KeysValues  # a layer id, or what only a target in this process gives


def stored(taps: Sequence[Tap]) -> tuple[int, ...]:
    """The layer ids among taps: what folders hold and servers hand out."""
    return tuple(tap for tap in taps if isinstance(tap, int))


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of one sample. `taps` [tokens, layers * hidden] in ascending layer order, behind them the
    taps that are no layer ids, as they were asked for; `last` [tokens, hidden] is the stream before the final
    norm; both in the dtype in which they were stored."""

    taps: Tensor
    last: Tensor


@dataclass(frozen=True)
class Batch:
    """Several samples packed into one row of `T` tokens, no padding between them.

    tokens [T] int64, loss_mask [T] bool, document [T] int64 (0, 1, ...; -1 is padding at the end), position
    [T] int64 (restarts in every document), taps [T, layers * hidden, or more as in HiddenStates], last [T,
    hidden]. `seed` decides every random draw. """

    tokens: Tensor
    loss_mask: Tensor
    document: Tensor
    position: Tensor
    taps: Tensor
    last: Tensor
    seed: int


@dataclass(frozen=True)
class Ratio:
    """A figure kept as a sum and a count, divided once when it is shown."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Step:
    """What one batch gave: the sum of the weighted losses, its denominator, and figures to show."""

    loss_sum: Tensor
    count: Tensor
    ratios: dict[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """Where training and in-process engines run: a PyTorch device, how many processes train, each on one of
    those, the autocast dtype, the attention kernel, the kernel that verifies drafts, and whether training is
    compiled."""

    device: Device
    processes: Count
    precision: Literal["bfloat16", "float32"]
    attention: str
    verify: str
    compile: bool
