"""What drafters share that are trained from anchors drawn in the answers: the draw, the tokens to be
predicted, and the sums of losses and acceptances over all of them.

An anchor is a position whose token is the newest known one, as when serving; position k of its draft (k >= 1)
is the token k places on. Shapes follow from the settings alone, so that a step compiles once.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainer.architectures import geometry
from trainer.architectures.base import DraftContext, Drafter, Exported
from trainer.architectures.layers import RMSNorm, Rotary
from trainer.architectures.losses import CrossEntropy, Objective
from trainer.architectures.vocabulary import Coverage, DraftVocabulary, counts_from, size_problem
from trainer.kernels.select import training_problem
from trainer.records import Batch, Ratio, Step, Tap
from trainer.target_head import TargetHead

QUIET = 0.2  # of the target's final norm. At its full scale a random start predicts its own last token with
# certainty, through the residual stream and the tied rows of embedding and head, and unlearns that first.


@dataclass(frozen=True)
class Targets:
    """What the drafts at some anchors should be. All [A, S] for S drafted positions: `places` in the row,
    `supervised` bool, `labels` rows of the draft vocabulary (-1 outside it), `previous` the target ids of the
    tokens just before."""

    places: Tensor
    supervised: Tensor
    labels: Tensor
    previous: Tensor


class Anchored(Drafter):
    """Holds the head and the objective; a method gives hidden states by `drafted`, and may correct
    `row_logits` or add `row_losses` of its own."""

    extra_terms: tuple[str, ...] = ()  # names of the columns that `row_losses` adds
    first_anchor: int = 0  # first position of a document that can be an anchor
    geometry: dict[str, Any]  # of a drafter that `scales`
    rotary: Rotary

    def __init__(self, context: DraftContext, tap_layers: Sequence[int], draft_vocab_size: int | None,
                 objective: Objective, anchors: int | None, loss_chunk: int,
                 train_head: bool = False) -> None:
        super().__init__()
        self.tap_layers = tuple(sorted(set(tap_layers)))
        self.objective, self.anchors, self.loss_chunk = objective, anchors, loss_chunk
        self.needs_last = objective.needs_teacher
        self.head = context.head
        self.vocabulary = DraftVocabulary(context, draft_vocab_size, train_head)

    def _start_norm(self, norm: RMSNorm, scale: float = QUIET) -> None:
        """Lets the last norm begin as `scale` times the target's, whose head reads it."""
        norm.weight.data.copy_(scale * (self.head.norm.float() + self.head.norm_offset))

    @classmethod
    def reads(cls, **settings: Any) -> tuple[tuple[Tap, ...], bool]:
        return tuple(settings["tap_layers"]), settings["objective"].needs_teacher

    @classmethod
    def fits_rows(cls, tokens: int, longest: int, **settings: Any) -> dict[str, str]:
        found, drafted = {}, cls.longest_draft(**settings)
        if drafted >= (room := min(tokens, longest)):
            found[cls.length_setting] = (f"must give drafts of fewer than {room} tokens, which a row of "
                                         f"train.tokens={tokens} and a text of target.max_length={longest} "
                                         f"have behind a token, but gives {drafted}")
        if (anchors := settings["anchors"]) is not None and anchors > tokens:
            found["anchors"] = (f"must be at most train.tokens={tokens}, the positions of a packed row, or "
                                f"null where the drafter has that, but is {anchors}")
        return found

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        found = {"draft_vocab_size": size_problem(settings.get("draft_vocab_size"), len({*special_ids}),
                                                  config["vocab_size"]),
                 "attention": training_problem(settings.get("attention", ""), device)}
        return {name: text for name, text in found.items() if text is not None}

    @abstractmethod
    def drafted(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Hidden states [A, S, H], ready for the head, of the S positions drafted at `anchors` [A], with the
        true tokens where a step reads the one before."""

    def row_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Draft logits [n, Vd] of rows of `drafted` [n, H], given the ids before them [n]."""
        return self.vocabulary.logits(hidden)

    def row_losses(self, hidden: Tensor, logits: Tensor, previous: Tensor, labels: Tensor,
                   teacher: Tensor | None) -> Tensor:
        """Weighted losses of the method's own, [n, len(extra_terms)] float32."""
        return logits.new_zeros(len(logits), 0, dtype=torch.float32)

    def loss(self, batch: Batch) -> Step:
        anchors, valid = self.draw(batch)  # all that the seed decides; a compiled step must not depend on it
        shares, count, accepted, blocks = self(replace(batch, seed=0), anchors, valid)
        names = [*(term.name for term in self.objective.terms), *self.extra_terms]
        ratios = {"accepted_length": Ratio(accepted.sum() + blocks, blocks)}
        ratios |= {f"accepted@{place + 1}": Ratio(reached, blocks) for place, reached in enumerate(accepted)}
        if len(names) > 1:
            ratios |= {f"loss/{name}": Ratio(share.detach(), count)
                       for name, share in zip(names, shares, strict=True)}
        return Step(shares.sum(), count, ratios)

    def forward(self, batch: Batch, anchors: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted loss sums [terms], the sum of the weights, drafts whose first k tokens were all right [S]
        (teacher-forced, greedy), and the number of drafts."""
        hidden = self.drafted(batch, anchors)
        slots = hidden.shape[1]
        targets = self.targets(batch, anchors, valid, slots)
        counted = targets.supervised & (targets.labels >= 0) if self.objective.needs_labels \
            else targets.supervised
        columns, best = self._columns(hidden, targets, batch.last)
        own = len(self.objective.terms)
        entropy = columns[..., own] if self.objective.positions.needs_cross_entropy else None
        weights = self.objective.positions(counted, entropy)
        extra = columns.shape[-1] - len(self.extra_terms)
        terms = torch.cat([columns[..., :own], columns[..., extra:]], dim=-1)
        right = ((best == targets.labels) & targets.supervised).int().cumprod(1)
        return (terms * weights[..., None]).sum((0, 1)), weights.sum(), right.sum(0), valid.sum()

    def draw(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`anchors` positions [A], ascending, whose own and next token were sampled by the target, drawn
        without replacement by the batch's seed; when there are fewer, the rest is marked invalid in the mask
        [A]. Without a number every position of the row has its place."""
        mask = batch.loss_mask
        following = torch.zeros_like(mask)
        following[:-1] = mask[1:] & mask[:-1] & (batch.document[1:] == batch.document[:-1])
        following &= batch.position >= self.first_anchor
        candidates = following.nonzero().flatten()
        count = mask.numel() if self.anchors is None else self.anchors
        generator = torch.Generator().manual_seed(batch.seed)
        chosen = torch.randperm(candidates.numel(), generator=generator)[:count].sort().values
        anchors = candidates[chosen.to(candidates.device)]
        valid = torch.arange(count, device=mask.device) < anchors.numel()
        return F.pad(anchors, (0, count - anchors.numel())), valid

    def targets(self, batch: Batch, anchors: Tensor, valid: Tensor, slots: int) -> Targets:
        """Drafts end with the answer: nothing after its last token is supervised, nor after a token that was
        not sampled."""
        places = anchors[:, None] + torch.arange(1, slots + 1, device=anchors.device)
        inside = places < batch.tokens.numel()
        places = places.clamp(max=batch.tokens.numel() - 1)
        supervised = inside & valid[:, None] & batch.loss_mask[places]
        supervised = supervised & (batch.document[places] == batch.document[anchors][:, None])
        supervised = supervised.int().cumprod(1).bool()
        return Targets(places, supervised, self.vocabulary.rows[batch.tokens[places]],
                       batch.tokens[places - 1])

    def _columns(self, hidden: Tensor, targets: Targets, last: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [A, S, columns] and greedy draft rows [A, S], at most `loss_chunk` rows of logits at a time;
        with several chunks they are computed again in the backward pass instead of being kept."""
        rows = hidden.flatten(0, 1)
        labels, previous = targets.labels.flatten(), targets.previous.flatten()
        states = last[(targets.places - 1).flatten()] if self.needs_last else None
        parts = []
        for start in range(0, len(rows), self.loss_chunk):
            part = slice(start, start + self.loss_chunk)
            given = rows[part], labels[part], previous[part], None if states is None else states[part]
            parts.append(self._chunk(*given) if len(rows) <= self.loss_chunk
                         else checkpoint(self._chunk, *given, use_reentrant=False))
        columns, best = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        return columns.unflatten(0, hidden.shape[:2]), best.view(hidden.shape[:2])

    def _chunk(self, hidden: Tensor, labels: Tensor, previous: Tensor,
               states: Tensor | None) -> tuple[Tensor, Tensor]:
        teacher = None if states is None else self.vocabulary.teacher_logits(self.head.normed(states))
        logits = self.row_logits(hidden, previous)
        columns = self.objective.columns(logits, labels, teacher)
        extra = self.row_losses(hidden, logits, previous, labels, teacher)
        return torch.cat([columns, extra], dim=-1), self.chosen(hidden, logits, previous)

    def chosen(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """The row [n] that a greedy draft takes."""
        return logits.argmax(-1)

    @torch.no_grad()
    def propose(self, context: Any, anchor: int, length: int) -> list[int]:
        return self.vocabulary.ids[self.draft_logits(context, anchor, length).argmax(-1)].tolist()

    def coverage(self, token_counts: Tensor) -> Coverage | None:
        return self.vocabulary.coverage(token_counts)

    def rounded(self, dtype: torch.dtype) -> Self:
        copied = super().rounded(dtype)
        copied.vocabulary.round_to(dtype)
        return copied

    def lengthened(self, context: int) -> Self:
        assert self.scales, "its positions are the target's"
        copied = copy.deepcopy(self)
        shape = copied.geometry = geometry.lengthened(self.geometry, context)
        copied.rotary = Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])
        return copied

    @classmethod
    def filled(cls, exported: Exported, head: TargetHead, mask_token_id: int, **settings: Any) -> Self:
        """A drafter for use (not training) with the tensors of a folder, strictly; `settings` are its
        method's."""
        weights, shape = dict(exported.weights), exported.geometry
        counts = counts_from(weights, head.vocab_size, settings.get("draft_vocab_size") or head.vocab_size)
        own_head, embedding = (weights.pop(f"{name}.weight", None) for name in ("lm_head", "embed_tokens"))
        drafter = cls(DraftContext(shape, head, mask_token_id, counts, (), {}),
                      layers=shape["num_hidden_layers"], intermediate_size=shape["intermediate_size"],
                      objective=Objective([CrossEntropy()]), anchors=0, loss_chunk=1, attention="reference",
                      seed=0, **settings)
        drafter.load_state_dict(weights, strict=True)
        if own_head is not None:
            drafter.vocabulary.head = own_head
        if embedding is not None:
            drafter.vocabulary.embedding = embedding
        return drafter.eval().requires_grad_(False)
