"""DFlash2: a DFlash block with a short convolution along its slots, and a choice among candidates.

Around every sublayer a grouped causal convolution mixes each slot with those before it in the block, with
kernels that the slot's own state adjusts. A selector then walks the slots: among the most likely candidates
of a slot it adds a low-rank score of the pair (token before, candidate). Served as vLLM's method `dflash`
with `model_executor/models/qwen3_dflash2.py`; its convolution spans 1 + K slots, so K = block_size - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.block_drafter import BlockContext, BlockDrafter
from trainer.architectures.block_layers import BlockLayer
from trainer.architectures.geometry import require_plain_logits
from trainer.architectures.losses import Objective
from trainer.kernels.select import BlockAttention
from trainer.ranges import AtLeast, Count, Layers, Positive, Seed, SequenceLength, Text
from trainer.target_head import TargetHead

Choice = Annotated[int, AtLeast(2)]  # of a single candidate there is nothing to learn


class GroupedConv(nn.Module):
    """out_t[c] = sum over j < taps of (base[side, j, c] + D_t[side, j, group(c)]) z_{t-j}[c] inside the block
    (nothing before its first slot), D = kernel_projection(u) from the normed input u of the sublayer. It
    begins as the identity. Both sides of a sublayer have one D."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        base = torch.zeros(2, taps, hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        self.taps, self.group = taps, group

    def kernels(self, normed: Tensor) -> Tensor:
        """Kernels [A, S, 2, taps, H] of normed inputs [A, S, H]."""
        own = self.kernel_projection(normed).unflatten(-1, (2, self.taps, -1))
        return self.base_kernel + own.repeat_interleave(self.group, dim=-1)

    def forward(self, kernels: Tensor, side: int, z: Tensor) -> Tensor:
        """z [A, S, H] -> [A, S, H] with the kernels of one side."""
        shifted = [F.pad(z, (0, 0, tap, 0))[:, :z.shape[1]] for tap in range(self.taps)]
        return sum(kernels[:, :, side, tap] * each for tap, each in enumerate(shifted)).to(z.dtype)


class ConvBlockLayer(BlockLayer):
    def __init__(self, shape: dict[str, Any], attend: Callable[..., Tensor], taps: int, group: int) -> None:
        super().__init__(shape, attend)
        self.attention_conv = GroupedConv(shape["hidden_size"], taps, group)
        self.mlp_conv = GroupedConv(shape["hidden_size"], taps, group)

    def forward(self, stream: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
                turns: tuple[Tensor, Tensor]) -> Tensor:
        stream = stream + self._around(self.attention_conv, self.input_layernorm(stream),
                                       lambda read: self.self_attn(read, keys, values, visible, turns))
        return stream + self._around(self.mlp_conv, self.post_attention_layernorm(stream), self.mlp)

    @staticmethod
    def _around(conv: GroupedConv, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        kernels = conv.kernels(normed)
        return conv(kernels, 1, sublayer(conv(kernels, 0, normed)))


class CandidateSelector(nn.Module):
    """Score of token u before candidate c at a state n: sum_r P[u, r] (W n)[r] S[c, r]."""

    def __init__(self, hidden: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * 0.1)
        self.successor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * 0.1)
        self.predecessor_codebook.is_table = self.successor_codebook.is_table = True
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """hidden [n, H], previous [n], candidates [n, c] -> [n, c]."""
        left = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        return (left[:, None] * F.embedding(candidates, self.successor_codebook)).sum(-1)


class DFlash2(BlockDrafter):
    """`selector_weight` is the factor of the selector's loss: the cross-entropy among the `selector_top_k`
    candidates, of which the last gives way to the token that came where that is missing. The whole vocabulary
    of the target is drafted, which the server requires."""

    method = "dflash"
    needs_v2 = True
    extra_terms = ("selector",)

    def __init__(self, context: DraftContext, layers: Count, block_size: SequenceLength, anchors: Count,
                 tap_layers: Layers, intermediate_size: Count | None, objective: Objective,
                 start_layers: Sequence[int], start_from: Text | None, loss_chunk: Count,
                 attention: BlockAttention, seed: Seed, conv_kernel_size: Count, conv_group_size: Count,
                 selector_rank: Count, selector_top_k: Choice, selector_weight: Positive) -> None:
        self.own = {"conv_kernel_size": conv_kernel_size, "conv_group_size": conv_group_size,
                    "selector_rank": selector_rank, "selector_top_k": selector_top_k}
        super().__init__(context, layers, block_size, anchors, tap_layers, None, intermediate_size, objective,
                         start_layers, start_from, loss_chunk, attention, seed)
        self.selector_weight = selector_weight
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            self.candidate_selector = CandidateSelector(self.geometry["hidden_size"], self.head.vocab_size,
                                                        selector_rank)
        for layer in self.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                nn.init.zeros_(conv.kernel_projection.weight)

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        size, taps = settings["block_size"], settings["conv_kernel_size"]
        return super().check(**settings) | ({} if taps <= size else {
            "conv_kernel_size": f"must be at most block_size={size}, as nothing lies before a block's first "
                                f"slot, but is {taps}"})

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        require_plain_logits(config, "the selector's scores")
        found = super().fits(config, special_ids, device, **settings)
        if config["hidden_size"] % settings["conv_group_size"]:
            found["conv_group_size"] = f"must divide the hidden size {config['hidden_size']}"
        if settings["selector_top_k"] > config["vocab_size"]:
            found["selector_top_k"] = f"must be at most the target's {config['vocab_size']} rows"
        if settings["selector_rank"] > config["vocab_size"]:
            found["selector_rank"] = f"must be at most the target's {config['vocab_size']} rows"
        return found

    @classmethod
    def shortest_draft(cls, **settings: Any) -> int:
        return cls.longest_draft(**settings)

    def make_layer(self, attend: Callable[..., Tensor]) -> BlockLayer:
        return ConvBlockLayer(self.geometry, attend, self.own["conv_kernel_size"],
                              self.own["conv_group_size"])

    def scores(self, hidden: Tensor, logits: Tensor, previous: Tensor,
               labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Candidates [n, c] of rows with these logits, and their scores [n, c] float32 behind the ids before;
        a label [n] that is no candidate takes the last one's place."""
        candidates = logits.detach().topk(self.own["selector_top_k"], dim=-1).indices
        if labels is not None:
            missing = (candidates != labels[:, None]).all(-1)
            last = torch.where(missing, labels, candidates[:, -1])
            candidates = torch.cat([candidates[:, :-1], last[:, None]], dim=-1)
        edges = self.candidate_selector(hidden, previous, candidates)
        return candidates, logits.gather(-1, candidates).float() + edges.float()

    def row_losses(self, hidden: Tensor, logits: Tensor, previous: Tensor, labels: Tensor,
                   teacher: Tensor | None) -> Tensor:
        candidates, scores = self.scores(hidden, logits, previous, labels)
        each = F.cross_entropy(scores, (candidates == labels[:, None]).int().argmax(-1), reduction="none")
        return (each * self.selector_weight)[:, None]

    def chosen(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        candidates, scores = self.scores(hidden, logits, previous)
        return candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)

    @torch.no_grad()
    def draft_logits(self, context: BlockContext, anchor: int, length: int) -> Tensor:
        """Tokens that are no candidates come after all that are."""
        hidden = self.block(context, anchor, length)
        found = []
        for row, logits in zip(hidden[:, None], self.vocabulary.logits(hidden)[:, None], strict=True):
            candidates, scores = self.scores(row, logits, torch.tensor([anchor], device=row.device))
            found.append(torch.minimum(logits, scores.min() - 1.0).scatter(-1, candidates, scores)[0])
            anchor = int(found[-1].argmax())
        return torch.stack(found)

    def export(self) -> Exported:
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()}
        taps = list(self.tap_layers)
        shared = {"architectures": ["DFlash2DraftModel"], "block_size": self.block_size,
                  "draft_vocab_size": self.head.vocab_size, "target_hidden_size": self.head.hidden_size}
        speculators = {"speculators_model_type": "dflash2", **shared, **self.own,
                       "aux_hidden_state_layer_ids": taps, "mask_token_id": self.mask_token_id,
                       "sample_from_anchor": False, "sliding_window_non_causal": True}
        inner = {"mask_token_id": self.mask_token_id, "causal": False, "sample_from_anchor": False,
                 **self.own, "target_layer_ids": [layer - 1 for layer in taps]}
        native = {**shared, "eagle_aux_hidden_state_layer_ids": taps, "dflash_config": inner}
        return Exported(weights, dict(self.geometry), {"speculators": speculators, "native": native})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config: dict[str, Any] = exported.flavours[flavour]
        inner = config if flavour == "speculators" else config["dflash_config"]
        own = {name: inner[name] for name in ("conv_kernel_size", "conv_group_size", "selector_rank",
                                              "selector_top_k")}
        taps = config["aux_hidden_state_layer_ids"] if flavour == "speculators" else \
            [layer + 1 for layer in inner["target_layer_ids"]]
        return cls.restored(exported, config, inner["mask_token_id"], taps, head, **own, selector_weight=1.0)
