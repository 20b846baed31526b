"""The reduced draft vocabulary: which target tokens a drafter can propose.

Chosen from counts of supervised tokens alone, ties and unseen tokens by ascending id, special tokens forced
in. Rows ascend by target id, which is what a server's `d2t` offsets and every trainer's boolean `t2d` agree
on. """

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.architectures.base import DraftContext
from trainer.errors import UserError

SIZES = (8192, 16384, 32768, 65536)  # for which the coverage is told beside the chosen size


@dataclass(frozen=True)
class Coverage:
    """A draft vocabulary of `rows` of the target's `total` tokens, judged from counts alone: it has `covered`
    of the supervised tokens, of which `distinct` are different; `special` tokens are in it whatever was
    counted. `curve` is the share by size, `by_category` that of the tokens of each category."""

    rows: int
    total: int
    covered: float
    distinct: int
    special: int
    curve: dict[int, float]
    by_category: dict[str, float] = field(default_factory=dict)

    def sentences(self) -> Iterator[str]:
        others = ", ".join(f"{size:,}: {share:.2%}" for size, share in self.curve.items())
        yield (f"draft vocabulary: drafter.draft_vocab_size={self.rows} of {self.total:,} tokens covers "
               f"{self.covered:.2%} of the supervised ones ({others or 'no usual size is smaller'}); "
               f"{self.special} special tokens are always in it")
        if len(self.by_category) > 1:
            worst_first = sorted(self.by_category.items(), key=lambda each: each[1])
            yield ("draft vocabulary by category: "
                   + ", ".join(f"{name} {share:.2%}" for name, share in worst_first))
        if self.rows > self.distinct:
            yield (f"note: drafter.draft_vocab_size={self.rows} is more than the {self.distinct:,} distinct "
                   f"tokens among the supervised ones, so {self.rows - self.distinct:,} or more of its rows "
                   "were never seen in training (special tokens, then the lowest ids); a smaller one drafts "
                   "as well and faster, or give more prompts")


class DraftVocabulary(nn.Module):
    """The target's head, or the rows of it that a drafter of `size` tokens has (null: all of them); frozen,
    but for drafters that train a head of their own from there (`trained`).

    ids [Vd] int64 are the target ids of the rows, rows [V] int64 the way back (-1: cannot be drafted). """

    ids: Tensor
    rows: Tensor
    head: Tensor
    teacher: Tensor
    embedding: Tensor

    def __init__(self, context: DraftContext, size: int | None, trained: bool = False) -> None:
        super().__init__()
        target = context.head
        total = target.vocab_size
        size = min(size or total, total)
        self.reduced, self.scale, self.softcap = size < total, target.logit_scale, target.softcap
        self.special = context.special_ids
        ids = choose(context.token_counts, size, context.special_ids) if self.reduced else torch.arange(total)
        rows = torch.full((total,), -1).scatter(0, ids, torch.arange(size))
        for name, tensor in (("ids", ids), ("rows", rows), ("embedding", target.embedding),
                             ("head", target.head[ids] if self.reduced else target.head)):
            self.register_buffer(name, tensor, persistent=False)
        self.trained = trained
        if trained:
            self.register_buffer("teacher", self.head, persistent=False)
            del self.head
            self.head = nn.Parameter(self.teacher.float().clone())
            self.head.is_table = True  # of rows that are scored one by one

    def coverage(self, counts: Tensor) -> Coverage | None:
        """How it covers tokens that were counted so often, `counts` [V]; None for the whole vocabulary."""
        if not self.reduced:
            return None
        return Coverage(self.ids.numel(), counts.numel(), coverage(counts, self.ids.cpu()),
                        int((counts > 0).sum()), len(set(self.special)),
                        curve(counts, SIZES, self.special))

    def embed(self, ids: Tensor) -> Tensor:
        """float32 embeddings [..., H] of target ids [...]."""
        return F.embedding(ids, self.embedding).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., Vd] of normed hidden states [..., H]."""
        return F.linear(hidden, self.head.to(hidden.dtype)) * self.scale

    @torch.no_grad()
    def teacher_logits(self, normed: Tensor) -> Tensor:
        """float32 logits [..., Vd] of the target, from its own normed last states [..., H]."""
        head = self.teacher if self.trained else self.head
        logits = (F.linear(normed, head.to(normed.dtype)) * self.scale).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def round_to(self, dtype: torch.dtype) -> None:
        if self.reduced and not self.trained:  # the whole of the target's head is not exported
            self.head = self.head.to(dtype).float()

    def exported(self) -> dict[str, Tensor]:
        """The tensors of a folder for a reduced vocabulary or a trained head; none for the target's own."""
        table = {"d2t": offsets(self.ids)} if self.reduced else {}
        return {"lm_head.weight": self.head.detach(), **table} if self.reduced or self.trained else {}


def counts_from(weights: dict[str, Tensor], vocab_size: int, rows: int) -> Tensor:
    """Token counts [V] that choose the vocabulary of a folder again, whose config says that it has `rows`;
    takes `d2t` out of `weights`. A table that is not one of that many target tokens is an error: a server
    would draft other tokens by it without a word."""
    table = weights.pop("d2t", None)
    head = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else None
    found = None if table is None else len(table)
    if (found, head) not in ([(None, None), (None, rows)] if rows == vocab_size else [(rows, rows)]):
        raise UserError(f"the speculator's config.json says draft_vocab_size={rows} of {vocab_size}, but its "
                        f"tensors have {_rows(found)} of d2t and {_rows(head)} of lm_head.weight; they are "
                        "of another drafter: export it again")
    if table is None:
        return torch.ones(vocab_size, dtype=torch.int64)
    ids = table + torch.arange(len(table))
    if ids[0] < 0 or ids[-1] >= vocab_size or not bool((ids.diff() > 0).all()):
        raise UserError(f"the speculator's d2t does not name {rows} ascending ids of the target's "
                        f"{vocab_size} tokens (target id = row + d2t[row]); it is of another target, or "
                        "holds the ids themselves: export it again")
    return torch.zeros(vocab_size, dtype=torch.int64).scatter(0, ids, 1)


def _rows(count: int | None) -> str:
    return "no row" if count is None else f"{count} rows"


def choose(counts: Tensor, size: int, forced: tuple[int, ...]) -> Tensor:
    """The `size` target ids of the draft vocabulary, ascending, [size] int64. `counts` [V] int64."""
    if problem := size_problem(size, len(set(forced)), counts.numel()):
        raise ValueError(f"drafter.draft_vocab_size={size} {problem}")
    ranked = counts.clone()
    ranked[list(forced)] = torch.iinfo(torch.int64).max
    return torch.argsort(ranked, descending=True, stable=True)[:size].sort().values


def size_problem(size: int | None, special: int, rows: int) -> str | None:
    """What is wrong with a draft vocabulary of `size` tokens (null: all) for a target of `rows` tokens, of
    which so many `special` ones are always in it; None when nothing is."""
    return None if size is None or special < size <= rows else \
        f"must lie between {special + 1}, as {special} special tokens are in it, and the target's {rows} rows"


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that `ids` can express."""
    return float(counts[ids].sum() / counts.sum().clamp(min=1))


def curve(counts: Tensor, sizes: Sequence[int], forced: tuple[int, ...] = ()) -> dict[int, float]:
    """The coverage of the vocabularies of those `sizes` that are smaller than the target's."""
    return {size: coverage(counts, choose(counts, size, forced)) for size in sizes
            if len(set(forced)) < size < counts.numel()}


def offsets(ids: Tensor) -> Tensor:
    """`d2t` as servers read it: target id = row + d2t[row], [size] int64."""
    return ids - torch.arange(ids.numel())
