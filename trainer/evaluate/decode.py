"""Draft, verify, accept: greedy speculative decoding in this process, for any drafter.

It walks as vLLM does (`v1/spec_decode`): the first token comes from the prompt alone, then every step drafts
K tokens after the newest one, and the counts take a whole step's acceptances even when the answer ends within
it. `replay` is the same walk along an answer that is known, without the target. """

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.architectures.base import Drafter
from trainer.engines.base import TargetEngine
from trainer.export.calibration import survival
from trainer.kernels.select import Verify
from trainer.kernels.verification import Sampling, Verification, Verified


@dataclass(frozen=True)
class Verifying:
    """`verify` is the kernel by which drafts are verified; each gives the same tokens."""

    verify: Verify


@dataclass(frozen=True)
class Selection:
    """Which part of a draft is verified: all before the first position whose calibrated chance to be reached
    and accepted is below `threshold`.

    Entry i of the confidences reads no token from i on (`Drafter.confidence`), and the chances never rise, so
    that nothing decides about token i but tokens before it: then, and only then, what is emitted has the
    target's distribution. """

    threshold: float
    temperatures: Sequence[float]

    def length(self, logits: Tensor) -> int:
        """Tokens to verify of a draft with these confidence logits [K]."""
        return int((survival(logits, self.temperatures) >= self.threshold).int().cumprod(0).sum())


@dataclass
class Counts:
    """Sums over steps, by vLLM's definitions: `per_position[i]` steps accepted more than i draft tokens. With
    a selection, `draft_tokens` are those verified, and steps whose whole draft is cut are drafts, too."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens a target step, the target's own included."""
        return 1 + self.accepted / max(1, self.drafts)

    def step(self, k: int, accepted: int) -> None:
        """Counts a draft of `k` tokens, of which `accepted` were right."""
        self.add(Counts(1, k, accepted, [int(place < accepted) for place in range(k)]))

    def add(self, other: Counts) -> None:
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted += other.accepted
        width = max(len(self.per_position), len(other.per_position))
        mine, theirs = (each + [0] * (width - len(each)) for each in (self.per_position, other.per_position))
        self.per_position = [one + two for one, two in zip(mine, theirs, strict=True)]


@dataclass(frozen=True)
class Decoded:
    """The answer's ids and what was counted on the way; `beyond` are those that the last step gave behind
    the answer's end."""

    tokens: tuple[int, ...]
    counts: Counts
    beyond: tuple[int, ...] = ()


def decode(engine: TargetEngine, drafter: Drafter, verify: Callable[[Verification], Verified],
           prompt: Sequence[int], k: int, max_new_tokens: int, end_ids: Sequence[int],
           selection: Selection | None = None) -> Decoded:
    """Answers `prompt` greedily with drafts of `k` tokens that `verify`, a kernel, verifies; the text is the
    target's, whatever the draft. With a `selection`, for a drafter that estimates, only the part of a draft
    that it says is verified. A ValueError says that the target has no most likely token."""
    session = engine.session(drafter.tap_layers)
    logits, taps = session.step(prompt)
    context = drafter.extend(drafter.new_context(), prompt, taps)
    answer = _emitted(verify, logits[-1:], [])
    limit = min(max_new_tokens, engine.max_length - len(prompt))  # where `generate` ends, too
    counts, beyond = Counts(per_position=[0] * k), []
    while answer[-1] not in end_ids and len(answer) < limit:
        draft = drafter.propose(context, answer[-1], k)
        if selection is not None:
            draft = draft[:selection.length(drafter.confidence(context, answer[-1], draft))]
        committed = len(prompt) + len(answer) - 1
        logits, taps = session.step([answer[-1], *draft])
        emitted = _emitted(verify, logits, draft)
        accepted = len(emitted) - 1
        session.rewind(committed + 1 + accepted)
        context = drafter.extend(context, [answer[-1], *draft[:accepted]], taps[:accepted + 1])
        counts.step(len(draft), accepted)
        answer += emitted
        whole, answer = answer, _ended(answer, end_ids, limit)
        beyond = whole[len(answer):]
    return Decoded(tuple(answer), counts, tuple(beyond))


def replay(drafter: Drafter, known: Sequence[int], taps: Tensor, prompt: int, length: int, k: int) -> Counts:
    """What `decode` counts where the target says `known`: `prompt` tokens, an answer of `length`, and more
    that drafts at its end are compared with. `taps` [known, layers * hidden] are those of `known`. A draft
    counts as far as something is known."""
    context = drafter.extend(drafter.new_context(), known[:prompt], taps[:prompt])
    counts, place = Counts(per_position=[0] * k), prompt  # of the newest token
    while place < prompt + length - 1:
        draft, wanted = drafter.propose(context, known[place], k), known[place + 1:place + 1 + k]
        accepted = next((index for index, token in enumerate(wanted) if token != draft[index]), len(wanted))
        counts.step(k, accepted)
        after = place + 1 + accepted
        context = drafter.extend(context, known[place:after], taps[place:after])
        place = after
    return counts


def _emitted(verify: Callable[[Verification], Verified], logits: Tensor, draft: Sequence[int]) -> list[int]:
    """The accepted tokens of a draft and the target's own behind them, by `logits` [len(draft) + 1, V]."""
    def one(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((1,), value, dtype=dtype, device=logits.device)

    greedy = Sampling(one(0, torch.float32), one(0, torch.int32), one(1, torch.float32),
                      one(0, torch.float32), one(0, torch.int64), one(0, torch.int64))
    done = verify(Verification(
        logits, torch.tensor([0, len(logits)], dtype=torch.int32, device=logits.device),
        torch.tensor([*draft, -1], device=logits.device), greedy, logits.shape[1]))
    done.raise_faults()
    return done.tokens[0, :int(done.counts[0])].tolist()


def _ended(answer: list[int], end_ids: Sequence[int], limit: int) -> list[int]:
    """The answer up to its first end token and the limit."""
    end = next((index + 1 for index, token in enumerate(answer) if token in end_ids), len(answer))
    return answer[:min(end, limit)]
