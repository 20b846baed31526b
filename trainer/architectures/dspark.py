"""DSpark: a DFlash block whose slots also hear the token before them, and say how sure they are.

Slot k = 0..S-1 of the block [x_p, MASK, ...] predicts the token at p + k + 1 (`sample_from_anchor`; without
it slot 0 predicts nothing, as in DFlash). Its logits are those of the head plus a low-rank bias W2 W1[u] of
the token u before it (Markov head), so a draft is one parallel pass and a short walk. The confidence head
estimates the overlap of draft and target at each slot. DSpark paper, sections 3 and 4; served as vLLM's
method `dspark` (`model_executor/models/qwen3_dspark.py`), which has this "vanilla" Markov head alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.block_drafter import BlockContext, BlockDrafter
from trainer.architectures.geometry import require_plain_logits
from trainer.architectures.losses import Objective, overlap
from trainer.kernels.select import BlockAttention
from trainer.ranges import Count, Layers, NotNegative, Seed, SequenceLength, Text
from trainer.target_head import TargetHead


class MarkovHead(nn.Module):
    """Bias [..., Vd] of the logits from the target id before: W2 W1[u]."""

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.markov_w1.weight.is_table = True
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        nn.init.normal_(self.markov_w2.weight, std=0.02)

    def forward(self, previous: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """Logit [...] of the overlap of a slot, from its state and the embedding of the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features).squeeze(-1)


class DSpark(BlockDrafter):
    """`markov_rank` is the rank of the bias; `confidence_weight` the factor of the confidence's loss
    (binary cross-entropy against the overlap, which gets no gradient)."""

    method = "dspark"
    other_formats = ("deepspec", "sglang")
    estimates = True
    needs_v2 = True
    extra_terms = ("confidence",)

    def __init__(self, context: DraftContext, layers: Count, block_size: SequenceLength, anchors: Count,
                 tap_layers: Layers, draft_vocab_size: Count | None, intermediate_size: Count | None,
                 objective: Objective, start_layers: Sequence[int], start_from: Text | None,
                 loss_chunk: Count, attention: BlockAttention, seed: Seed, sample_from_anchor: bool,
                 markov_rank: Count, confidence_weight: NotNegative) -> None:
        self.first_slot = 0 if sample_from_anchor else 1
        super().__init__(context, layers, block_size, anchors, tap_layers, draft_vocab_size,
                         intermediate_size, objective, start_layers, start_from, loss_chunk, attention, seed)
        self.needs_last = True  # of the confidence
        self.markov_rank, self.confidence_weight = markov_rank, confidence_weight
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            self.markov_head = MarkovHead(self.head.vocab_size, self.vocabulary.ids.numel(), markov_rank)
        self.confidence_head = ConfidenceHead(self.geometry["hidden_size"] + markov_rank)

    @classmethod
    def longest_draft(cls, **settings: Any) -> int:
        return settings["block_size"] - (0 if settings["sample_from_anchor"] else 1)

    @classmethod
    def reads(cls, **settings: Any) -> tuple[tuple[int, ...], bool]:
        return super().reads(**settings)[0], True

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        require_plain_logits(config, "a bias")
        found = super().fits(config, special_ids, device, **settings)
        if settings["markov_rank"] > (rows := settings["draft_vocab_size"] or config["vocab_size"]):
            found["markov_rank"] = f"must be at most the {rows} rows of the bias: more add nothing"
        return found

    def row_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.vocabulary.logits(hidden) + self.markov_head(previous)

    def row_losses(self, hidden: Tensor, logits: Tensor, previous: Tensor, labels: Tensor,
                   teacher: Tensor | None) -> Tensor:
        wanted = overlap(logits.detach(), teacher)
        found = self.row_confidence(hidden, previous).float()
        each = F.binary_cross_entropy_with_logits(found, wanted, reduction="none")
        return (each * self.confidence_weight)[:, None]

    def row_confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [n] of the overlap of rows [n, H] behind the ids [n]."""
        embedded = self.markov_head.markov_w1(previous)
        return self.confidence_head(torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1))

    @torch.no_grad()
    def draft_logits(self, context: BlockContext, anchor: int, length: int) -> Tensor:
        logits = []
        for row in self.block(context, anchor, length):
            logits.append(self.row_logits(row[None], torch.tensor([anchor], device=row.device))[0])
            anchor = int(self.vocabulary.ids[logits[-1].argmax()])
        return torch.stack(logits)

    @torch.no_grad()
    def confidence(self, context: BlockContext, anchor: int, draft: Sequence[int]) -> Tensor:
        hidden = self.block(context, anchor, len(draft))
        return self.row_confidence(hidden, torch.tensor([anchor, *draft[:-1]], device=hidden.device))

    def export(self) -> Exported:
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()}
        taps = list(self.tap_layers)
        keys = {"block_size": self.block_size, "mask_token_id": self.mask_token_id,
                "draft_vocab_size": self.vocabulary.ids.numel(), "target_hidden_size": self.head.hidden_size,
                "sample_from_anchor": not self.first_slot, "markov_rank": self.markov_rank,
                "markov_head_type": "vanilla", "enable_confidence_head": True,
                "confidence_head_with_markov": True}
        speculators = {"speculators_model_type": "dspark", "architectures": ["Qwen3DSparkModel"], **keys,
                       "aux_hidden_state_layer_ids": taps}
        native = {"architectures": ["Qwen3DSparkModel"], **keys, "eagle_aux_hidden_state_layer_ids": taps,
                  "target_layer_ids": [layer - 1 for layer in taps]}
        return Exported(weights | self.vocabulary.exported(), dict(self.geometry),
                        {"speculators": speculators, "native": native})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config: dict[str, Any] = exported.flavours[flavour]
        taps = config["aux_hidden_state_layer_ids"] if flavour == "speculators" else \
            [layer + 1 for layer in config["target_layer_ids"]]
        return cls.restored(exported, config, config["mask_token_id"], taps, head,
                            draft_vocab_size=config["draft_vocab_size"],
                            sample_from_anchor=config["sample_from_anchor"],
                            markov_rank=config["markov_rank"], confidence_weight=1.0)
