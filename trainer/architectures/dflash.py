"""DFlash: a block of tokens in one parallel pass, conditioned on the target's hidden states.

Two streams meet only in attention. *Context*: for every committed token p, c_p = hidden_norm(fc(taps_p)),
from which each layer makes keys and values. *Query*: the block [x_p, MASK, ..., MASK] at positions p, p+1,
... after the anchor p, the newest token. Slots see the context before p and all slots of their block. Slot k
>= 1 predicts the token at p + k; slot 0 carries the anchor and predicts nothing. Served as vLLM's method
`dflash` (`model_executor/models/qwen3_dflash.py`), whose tensor names are the parameter names here.

Given up: sliding windows (all layers attend fully and non-causally), and attention sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainer.architectures import losses, vocabulary
from trainer.architectures.base import DraftContext, Drafter, Exported
from trainer.architectures.block_layers import BlockLayer
from trainer.architectures.layers import RMSNorm, Rotary
from trainer.kernels.select import BlockAttention, block_attention
from trainer.ranges import Count, Layers, Positive, Seed, SequenceLength
from trainer.records import Batch, Ratio, Step
from trainer.target_head import TargetHead


@dataclass
class BlockContext:
    """Keys and values of committed tokens, for each layer [tokens, kv_heads, head_dim]; grows by `extend`."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int


class DFlash(Drafter):
    """`block_size` slots with `anchors` blocks drawn a packed row; `start_layers` are 0-based target layers
    that the draft layers start from (empty: random); `loss_chunk` bounds the rows of logits held at once."""

    method = "dflash"

    def __init__(self, context: DraftContext, layers: Count, block_size: SequenceLength, anchors: Count,
                 tap_layers: Layers, draft_vocab_size: Count | None, intermediate_size: Count | None,
                 objective: Literal["ce", "kl"], decay_gamma: Positive, start_layers: Sequence[int],
                 loss_chunk: Count, attention: BlockAttention, seed: Seed) -> None:
        super().__init__()
        self.tap_layers = tuple(sorted(set(tap_layers)))
        self.needs_last = objective == "kl"
        self.max_k = self.longest_draft(block_size=block_size)
        self.block_size, self.anchors, self.objective = block_size, anchors, objective
        self.loss_chunk, self.head, self.mask_token_id = loss_chunk, context.head, context.mask_token_id
        self.geometry = _geometry(context.config, layers, intermediate_size)
        attend = block_attention(attention)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._build(attend)
        self._start_from(context, start_layers)
        self.decay: Tensor
        self.register_buffer("decay", losses.decay_weights(block_size - 1, decay_gamma), persistent=False)
        rows = context.head.vocab_size
        size = min(draft_vocab_size or rows, rows)
        ids = torch.arange(rows)
        if size < rows:
            ids = vocabulary.choose(context.token_counts, size, context.special_ids)
        self.reduced = size < rows
        self.register_buffer("draft_ids", ids, persistent=False)
        draft_rows = torch.full((rows,), -1).scatter(0, ids, torch.arange(size))
        self.register_buffer("draft_rows", draft_rows, persistent=False)
        self.register_buffer("embedding", context.head.embedding, persistent=False)
        self.register_buffer("draft_head", context.head.head[ids] if self.reduced else context.head.head,
                             persistent=False)

    def _build(self, attend: Callable[..., Tensor]) -> None:
        shape = self.geometry
        hidden, eps = shape["hidden_size"], shape["rms_norm_eps"]
        self.fc = nn.Linear(len(self.tap_layers) * self.head.hidden_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(shape, attend) for _ in range(shape["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, eps)
        self.rotary = Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def _start_from(self, context: DraftContext, start_layers: Sequence[int]) -> None:
        """Copies target layers, and lets `fc` begin as the newest tapped layer, whose scale keys expect."""
        self.norm.weight.data.copy_(context.head.norm.float() + context.head.norm_offset)
        if not start_layers:
            return
        offset = context.head.norm_offset  # of the norms, whose weights are the only vectors
        tensors = [{name: tensor.float() + offset if tensor.ndim == 1 else tensor
                    for name, tensor in context.layer_tensors[index].items()} for index in start_layers]
        if "input_layernorm.weight" in tensors[0]:  # the context has one norm, the target one a layer
            self.hidden_norm.weight.data.copy_(tensors[0]["input_layernorm.weight"])
        for layer, own in zip(self.layers, tensors, strict=True):
            layer.start_from(own)
        with torch.no_grad():
            self.fc.weight.mul_(0.1)
            if self.head.hidden_size == self.geometry["hidden_size"]:
                self.fc.weight[:, -self.head.hidden_size:] += torch.eye(self.head.hidden_size)

    @classmethod
    def longest_draft(cls, **settings: Any) -> int:
        return settings["block_size"] - 1

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        given, layers = settings["start_layers"], settings["layers"]
        return {} if len(given) in (0, layers) else {
            "start_layers": f"must name one target layer for each of the {layers} draft layers, or none, but "
                            f"is {list(given)}"}

    @classmethod
    def initial_layers(cls, **settings: Any) -> tuple[int, ...]:
        return tuple(settings["start_layers"])

    def loss(self, batch: Batch) -> Step:
        anchors, valid = self._draw_anchors(batch)
        loss_sum, count, accepted, first = self(batch.tokens, batch.loss_mask, batch.document, batch.position,
                                                batch.taps, batch.last, anchors, valid)
        blocks = valid.sum()
        return Step(loss_sum, count, {"accepted_length": Ratio(accepted + blocks, blocks),
                                      "accepted@1": Ratio(first, blocks)})

    def forward(self, tokens: Tensor, loss_mask: Tensor, document: Tensor, position: Tensor, taps: Tensor,
                last: Tensor, anchors: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the blocks at `anchors` [A]: weighted losses, their weights, accepted draft tokens
        (teacher-forced), and acceptances of the first slot. Shapes follow from the settings alone."""
        hidden = self._blocks(tokens, document, position, taps, anchors)[:, 1:]  # slots 1.. predict
        places = anchors[:, None] + torch.arange(1, self.block_size, device=anchors.device)
        inside = places < tokens.numel()
        places = places.clamp(max=tokens.numel() - 1)
        supervised = inside & valid[:, None] & loss_mask[places]
        supervised = supervised & (document[places] == document[anchors][:, None])
        supervised = supervised.int().cumprod(1).bool()  # nothing after the end of an answer is drafted for
        labels = self.draft_rows[tokens[places]]
        known = supervised if self.needs_last else supervised & (labels >= 0)
        teacher = self._teacher_logits(last) if self.needs_last else None
        each, best = self._position_losses(hidden.flatten(0, 1), labels.flatten(), teacher,
                                           (places - 1).flatten())
        weights = self.decay * known
        run = ((best.view_as(labels) == labels) & supervised).int().cumprod(1)
        return (each.view_as(weights) * weights).sum(), weights.sum(), run.sum(), run[:, 0].sum()

    def _draw_anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`anchors` positions [A], ascending, whose own and next token were sampled by the target, drawn
        without replacement; when there are fewer, the rest is marked invalid in the mask [A]."""
        mask = batch.loss_mask
        following = torch.zeros_like(mask)
        following[:-1] = mask[1:] & mask[:-1] & (batch.document[1:] == batch.document[:-1])
        candidates = following.nonzero().flatten()
        generator = torch.Generator().manual_seed(batch.seed)
        chosen = torch.randperm(candidates.numel(), generator=generator)[:self.anchors].sort().values
        anchors = candidates[chosen.to(candidates.device)]
        padding = self.anchors - anchors.numel()
        valid = torch.arange(self.anchors, device=mask.device) < anchors.numel()
        return F.pad(anchors, (0, padding)), valid

    def _blocks(self, tokens: Tensor, document: Tensor, position: Tensor, taps: Tensor,
                anchors: Tensor) -> Tensor:
        """Hidden states [A, S, H] after the final norm of the blocks at `anchors` [A]."""
        context = self._features(taps)
        visible = (document[anchors][:, None] == document) & (position < position[anchors][:, None])
        ids = torch.full((anchors.numel(), self.block_size), self.mask_token_id, device=anchors.device)
        ids[:, 0] = tokens[anchors]
        places = position[anchors][:, None] + torch.arange(self.block_size, device=anchors.device)
        turns = self.rotary(position), self.rotary(places)
        stream = F.embedding(ids, self.embedding).float()
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(context, *turns[0])
            stream = layer(stream, keys, values, visible, turns[1])
        return self.norm(stream)

    def _features(self, taps: Tensor) -> Tensor:
        """Context features [T, H] of taps [T, layers * hidden] in any dtype."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def _teacher_logits(self, last: Tensor) -> Tensor:
        """The target's logits [T, Vd] over the draft vocabulary."""
        with torch.no_grad():
            logits, cap = self.logits(self.head.normed(last)).float(), self.head.softcap
            return logits if cap is None else torch.tanh(logits / cap) * cap

    def _position_losses(self, hidden: Tensor, labels: Tensor, teacher: Tensor | None,
                         teacher_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [n] and greedy draft rows [n], at most `loss_chunk` rows at a time; with several chunks
        logits are computed again in the backward pass instead of being kept."""
        count = len(hidden)
        if count <= self.loss_chunk:
            return self._chunk_losses(hidden, labels, teacher, teacher_rows)
        parts = [checkpoint(self._chunk_losses, hidden[start:start + self.loss_chunk],
                            labels[start:start + self.loss_chunk], teacher,
                            teacher_rows[start:start + self.loss_chunk], use_reentrant=False)
                 for start in range(0, count, self.loss_chunk)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _chunk_losses(self, hidden: Tensor, labels: Tensor, teacher: Tensor | None,
                      teacher_rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden)
        each = losses.cross_entropy(logits, labels.clamp(min=0)) if teacher is None \
            else losses.forward_kl(logits, teacher[teacher_rows])
        return each, logits.argmax(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., Vd] of normed hidden states [..., H]."""
        return F.linear(hidden, self.draft_head.to(hidden.dtype)) * self.head.logit_scale

    def new_context(self) -> BlockContext:
        shape = self.geometry
        empty = torch.zeros(0, shape["num_key_value_heads"], shape["head_dim"], device=self.draft_ids.device)
        count = len(self.layers)
        return BlockContext([empty] * count, [empty] * count, 0)

    @torch.no_grad()
    def extend(self, context: BlockContext, taps: Tensor) -> BlockContext:
        features = self._features(taps)
        cos, sin = self.rotary(torch.arange(context.length, context.length + len(taps), device=taps.device))
        made = [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]
        keys = [torch.cat([old, new]) for old, (new, _) in zip(context.keys, made, strict=True)]
        values = [torch.cat([old, new]) for old, (_, new) in zip(context.values, made, strict=True)]
        return BlockContext(keys, values, context.length + len(taps))

    @torch.no_grad()
    def propose(self, context: BlockContext, anchor: int, length: int) -> list[int]:
        return self.draft_ids[self.draft_logits(context, anchor, length).argmax(-1)].tolist()

    @torch.no_grad()
    def draft_logits(self, context: BlockContext, anchor: int, length: int) -> Tensor:
        device = self.draft_ids.device
        ids = torch.full((1, length + 1), self.mask_token_id, device=device)
        ids[0, 0] = anchor
        places = context.length + torch.arange(length + 1, device=device)[None]
        visible = torch.ones(1, context.length, dtype=torch.bool, device=device)
        stream = F.embedding(ids, self.embedding).to(self.fc.weight.dtype)
        for layer, keys, values in zip(self.layers, context.keys, context.values, strict=True):
            stream = layer(stream, keys, values, visible, self.rotary(places))
        return self.logits(self.norm(stream)[0, 1:])

    def rounded(self, dtype: torch.dtype) -> Self:
        copied = super().rounded(dtype)
        if self.reduced:  # otherwise the head is the target's own and not exported
            copied.draft_head = copied.draft_head.to(dtype).float()
        return copied

    def export(self) -> Exported:
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if self.reduced:
            weights["lm_head.weight"] = self.draft_head
            weights["d2t"] = vocabulary.offsets(self.draft_ids)
        rows = self.draft_ids.numel()
        speculators = {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"],
                       "aux_hidden_state_layer_ids": list(self.tap_layers), "block_size": self.block_size,
                       "mask_token_id": self.mask_token_id, "draft_vocab_size": rows,
                       "sample_from_anchor": False,
                       "sliding_window_non_causal": True,  # false would make every layer causal when served
                       "target_hidden_size": self.head.hidden_size}
        inner = {"mask_token_id": self.mask_token_id, "causal": False, "sample_from_anchor": False,
                 "target_layer_ids": [layer - 1 for layer in self.tap_layers]}
        native = {"architectures": ["DFlashDraftModel"], "block_size": self.block_size,
                  "draft_vocab_size": rows, "eagle_aux_hidden_state_layer_ids": list(self.tap_layers),
                  "target_hidden_size": self.head.hidden_size, "dflash_config": inner}
        return Exported(weights, dict(self.geometry), {"speculators": speculators, "native": native})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config = exported.flavours[flavour]
        inner = config if flavour == "speculators" else config["dflash_config"]
        taps = config["aux_hidden_state_layer_ids"] if flavour == "speculators" else \
            [layer + 1 for layer in inner["target_layer_ids"]]
        weights = dict(exported.weights)
        counts = torch.ones(head.vocab_size, dtype=torch.int64)
        if (offsets := weights.pop("d2t", None)) is not None:
            counts = torch.zeros_like(counts).scatter(0, offsets + torch.arange(len(offsets)), 1)
        own_head = weights.pop("lm_head.weight", None)
        context = DraftContext(exported.geometry, head, inner["mask_token_id"], counts, (), {})
        drafter = cls(context, layers=exported.geometry["num_hidden_layers"], block_size=config["block_size"],
                      anchors=0, tap_layers=taps, draft_vocab_size=config["draft_vocab_size"],
                      intermediate_size=exported.geometry["intermediate_size"], objective="ce",
                      decay_gamma=1.0, start_layers=(), loss_chunk=1, attention="reference", seed=0)
        drafter.load_state_dict(weights, strict=True)
        if own_head is not None:
            drafter.draft_head = own_head
        return drafter.eval().requires_grad_(False)


def _geometry(config: dict[str, Any], layers: int, intermediate_size: int | None) -> dict[str, Any]:
    """The draft's decoder config, field by field: the target's sizes and rotary settings, Qwen3's layout."""
    heads = config["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("the target's config.json has no rope_theta, so the draft's positions would be "
                         "guessed; write rope_parameters into it")
    return {"model_type": "qwen3", "hidden_size": config["hidden_size"], "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "intermediate_size": intermediate_size or config["intermediate_size"], "hidden_act": "silu",
            "rms_norm_eps": float(config["rms_norm_eps"]), "attention_bias": False, "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", **rope, "rope_theta": float(theta)},
            "max_position_embeddings": config["max_position_embeddings"], "vocab_size": config["vocab_size"],
            "layer_types": ["full_attention"] * layers, "sliding_window": None, "use_sliding_window": False,
            "tie_word_embeddings": False, "initializer_range": 0.02}
