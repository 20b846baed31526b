"""The promise of a drafter, and what it is built from."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from trainer.records import Batch, Step, Tap
from trainer.target_head import TargetHead

if TYPE_CHECKING:
    from trainer.architectures.vocabulary import Coverage


@dataclass(frozen=True)
class DraftContext:
    """Facts of the target that a drafter is built for.

    `config` is the target's (text) config.json; `token_counts` [V] int64 counts supervised tokens of the
    training data (they choose a reduced draft vocabulary); `special_ids` are always part of that vocabulary;
    `layer_tensors` has weights of the target's layers for drafters that start from those, `own_tensors` those
    of the drafter that the target brings along, in the names of its files. """

    config: dict[str, Any]
    head: TargetHead
    mask_token_id: int
    token_counts: Tensor
    special_ids: tuple[int, ...]
    layer_tensors: dict[int, dict[str, Tensor]]
    own_tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """What a drafter gives to, and reads from, a folder that a server loads.

    `geometry` are the keys of an ordinary decoder config; `flavours` holds the method's own keys for each
    format, in that format's names and layer conventions. Weights named in `exact` keep their dtype. """

    weights: dict[str, Tensor]
    geometry: dict[str, Any]
    flavours: dict[str, dict[str, Any]]
    exact: frozenset[str] = frozenset()


class Drafter(nn.Module, ABC):
    """Trained parameters are float32 masters; the loop casts activations with autocast."""

    tap_layers: tuple[Tap, ...]  # what it reads of the target: layer ids, ascending, then other taps
    needs_last: bool             # whether the loss reads the target's last state
    max_k: int                   # longest draft that it was trained for
    method: str                  # the server's name of the method
    formats: tuple[str, ...] = ("speculators", "native")  # of the folders that it can be exported to
    other_formats: tuple[str, ...] = ()  # of those that hold it with some settings alone
    scales: bool = False         # whether it has rotary positions of its own, for `lengthened`
    estimates: bool = False      # whether `confidence` has something to say
    needs_v2: bool = False       # whether vLLM has the method in its Model Runner V2 alone
    length_setting: str = "steps"  # the setting that `longest_draft` follows
    needs: str = ""              # what a recipe sets for it besides the drafter, as the end of a sentence

    @abstractmethod
    def loss(self, batch: Batch) -> Step:
        """Sums and counts of one packed row. All randomness comes from `batch.seed`."""

    @abstractmethod
    def new_context(self) -> Any:
        """Empty state of one sequence for `extend` and `propose`."""

    @abstractmethod
    def extend(self, context: Any, tokens: Sequence[int], taps: Tensor) -> Any:
        """Takes in the next n committed `tokens`, which the target has processed, and their hidden states
        `taps` [n, layers * hidden], or as wide as what it reads is."""

    def parts(self, taps: Tensor) -> dict[str, Tensor]:
        """`taps` [n, ...] by what people call each of them."""
        parts = taps.chunk(len(self.tap_layers), dim=-1)
        return {f"hidden states of layer {tap}": part
                for tap, part in zip(self.tap_layers, parts, strict=True)}

    @abstractmethod
    def draft_logits(self, context: Any, anchor: int, length: int) -> Tensor:
        """Logits [length, draft vocabulary] behind `propose`, as a server computes them: where a step reads
        the token before it, that is the greedy one."""

    @abstractmethod
    def propose(self, context: Any, anchor: int, length: int) -> list[int]:
        """A greedy draft of `length` tokens (target ids) after `anchor`, the newest token, which the target
        has not processed yet. Never looks past the anchor."""

    def confidence(self, context: Any, anchor: int, draft: Sequence[int]) -> Tensor | None:
        """Logits [len(draft)] of how likely each token of `draft` (target ids) is to be accepted once those
        before it were; None where the method has no such estimate. Entry i reads `anchor` and draft[:i],
        never draft[i] or later: whether a token is verified must not depend on its value, or the text would
        not be the target's."""
        return None

    def coverage(self, token_counts: Tensor) -> Coverage | None:
        """How its draft vocabulary covers tokens [V] counted so often; None when it has the target's."""
        return None

    @abstractmethod
    def export(self) -> Exported:
        """Names and layout that a server expects."""

    @classmethod
    @abstractmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        """The drafter that a folder of this flavour describes, from its config and tensors alone; strict."""

    def rounded(self, dtype: torch.dtype) -> Self:
        """A float32 copy whose exported tensors hold values of `dtype`: what such a folder describes."""
        copied = copy.deepcopy(self).requires_grad_(False)
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(dtype))
        return copied

    def lengthened(self, context: int) -> Self:
        """A copy whose rotary positions are scaled for texts of `context` tokens, of a drafter that `scales`;
        ValueError where there is nothing to scale."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def longest_draft(cls, **settings: Any) -> int:
        """The `max_k` of a drafter with these settings (those of its YAML), which is not built for it."""

    @classmethod
    def shortest_draft(cls, **settings: Any) -> int:
        """The fewest tokens that a server may have it draft, with these settings."""
        return 1

    @classmethod
    def served_problem(cls, config: dict[str, Any], k: int, **settings: Any) -> str | None:
        """Why no server has it draft `k` tokens, which it can, for a target with this (text) config."""
        return None

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        """By setting what is wrong with those that are right one by one, taken together."""
        return {}

    @classmethod
    def fits_rows(cls, tokens: int, longest: int, **settings: Any) -> dict[str, str]:
        """By setting what no packed row of `tokens` tokens can ever use, or no text of at most `longest`."""
        return {}

    @classmethod
    def reads(cls, **settings: Any) -> tuple[tuple[Tap, ...], bool]:
        """The `tap_layers` and `needs_last` of a drafter with these settings, which is not built for it."""
        return (), False

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        """By setting what is wrong with it for a target with this (text) config.json and these special ids,
        or for training on `device` (null: it is only used). ValueError when the target lacks something."""
        return {}

    @classmethod
    def initial_layers(cls, **settings: Any) -> tuple[int, ...]:
        """0-based target layers whose weights the constructor wants in `DraftContext.layer_tensors`."""
        return ()

    @classmethod
    def own_prefixes(cls, config: dict[str, Any], **settings: Any) -> tuple[str, ...]:
        """How the names of the target's tensors begin that the constructor wants in
        `DraftContext.own_tensors`. `config` is the target's (text) config."""
        return ()

    @classmethod
    def own_problem(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
        """Why it cannot begin with those of the target, given without their values (device meta)."""
        return None

    @classmethod
    def nested_problem(cls, **settings: Any) -> str | None:
        """Why it cannot be served with a target whose text part is nested in its config.json."""
        return None

    @classmethod
    def initial_folder(cls, **settings: Any) -> str | None:
        """Folder of an exported drafter whose tensors training begins with, by `begin_with`."""
        return None

    @classmethod
    def start_problem(cls, given: dict[str, Any], config: dict[str, Any], mask_token_id: int,
                      **settings: Any) -> str | None:
        """Why it cannot begin with the drafter whose config.json is `given`, for a target with this `config`:
        the key, what was found and expected, and a remedy."""
        return "this drafter cannot begin with another one"

    def begin_with(self, tensors: dict[str, Tensor]) -> None:
        """Takes the weights of an exported drafter that has no `start_problem`; raises ValueError when they
        are not those that its config promises."""
        raise NotImplementedError
