"""The backbone of the block drafters: a block of slots in one parallel pass, fed by the target's states.

Two streams meet only in attention. *Context*: for every committed token p, c_p = hidden_norm(fc(taps_p)),
from which each layer makes keys and values. *Query*: the block [x_p, MASK, ..., MASK] at positions p, p+1,
... after the anchor p, the newest token. Slots see the context before p and all slots of their block. vLLM's
`model_executor/models/qwen3_dflash.py` has the same equations, and its tensor names are the parameter names
here. Given up: sliding windows (all layers attend fully and non-causally), and attention sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainer.architectures import warm_start
from trainer.architectures.anchored import Anchored
from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.block_layers import BlockLayer
from trainer.architectures.geometry import geometry
from trainer.architectures.layers import RMSNorm, Rotary
from trainer.architectures.losses import Objective
from trainer.kernels.select import BlockAttention, block_attention
from trainer.ranges import Count, Layers, Seed, SequenceLength, Text
from trainer.records import Batch
from trainer.target_head import TargetHead


@dataclass
class BlockContext:
    """Keys and values of committed tokens, for each layer [tokens, kv_heads, head_dim]; grows by `extend`."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int


class BlockDrafter(Anchored):
    """`block_size` slots with `anchors` blocks drawn a packed row; `start_layers` are 0-based target layers
    that the draft layers start from (empty: random), `start_from` the folder of an exported block drafter
    that training begins with; `loss_chunk` bounds the rows of logits held at once. Slot k of a block stands
    at position p + k; those from `first_slot` on predict."""

    other_formats = ("zlab", "sglang")
    scales = True
    first_slot: int = 1
    length_setting = "block_size"

    def __init__(self, context: DraftContext, layers: Count, block_size: SequenceLength, anchors: Count,
                 tap_layers: Layers, draft_vocab_size: Count | None, intermediate_size: Count | None,
                 objective: Objective, start_layers: Sequence[int], start_from: Text | None,
                 loss_chunk: Count, attention: BlockAttention, seed: Seed) -> None:
        super().__init__(context, tap_layers, draft_vocab_size, objective, anchors, loss_chunk)
        self.block_size, self.max_k = block_size, block_size - self.first_slot
        self.mask_token_id = context.mask_token_id
        self.geometry = geometry(context.config, layers, intermediate_size)
        attend = block_attention(attention)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._build(attend)
        self._start_from_target(context, start_layers)

    def _build(self, attend: Callable[..., Tensor]) -> None:
        shape = self.geometry
        hidden, eps = shape["hidden_size"], shape["rms_norm_eps"]
        self.fc = nn.Linear(len(self.tap_layers) * self.head.hidden_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(self.make_layer(attend) for _ in range(shape["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, eps)
        self.rotary = Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def make_layer(self, attend: Callable[..., Tensor]) -> BlockLayer:
        return BlockLayer(self.geometry, attend)

    def _start_from_target(self, context: DraftContext, start_layers: Sequence[int]) -> None:
        """Copies target layers, and lets `fc` begin as the newest tapped layer, whose scale keys expect."""
        if not start_layers:
            self._start_norm(self.norm)
            return
        self._start_norm(self.norm, 1.0)
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
        return settings["block_size"] - cls.first_slot

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        given, layers = settings["start_layers"], settings["layers"]
        if len(given) not in (0, layers):
            return {"start_layers": f"must name one target layer for each of the {layers} draft layers, or "
                                    f"none, but is {list(given)}"}
        return {"start_from": "must be null beside start_layers, as both say what training begins with"} \
            if given and settings["start_from"] is not None else {}

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        shape = geometry(config, settings["layers"], settings["intermediate_size"])
        Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])
        found = super().fits(config, special_ids, device, **settings)
        given, width = settings["intermediate_size"], config.get("intermediate_size")
        if settings["start_layers"] and given not in (None, width):
            found["intermediate_size"] = (
                f"must be null or {width} beside start_layers, as the target's MLPs are of that width and no "
                f"other could begin with them, but is {given}")
        return found

    @classmethod
    def initial_layers(cls, **settings: Any) -> tuple[int, ...]:
        return tuple(settings["start_layers"])

    @classmethod
    def initial_folder(cls, **settings: Any) -> str | None:
        return settings["start_from"]

    @classmethod
    def start_problem(cls, given: dict[str, Any], config: dict[str, Any], mask_token_id: int,
                      **settings: Any) -> str | None:
        own = geometry(config, settings["layers"], settings["intermediate_size"])
        return warm_start.difference(given, own, sorted(settings["tap_layers"]), mask_token_id)

    def begin_with(self, tensors: dict[str, Tensor]) -> None:
        warm_start.copy_backbone(self, tensors)

    def drafted(self, batch: Batch, anchors: Tensor) -> Tensor:
        context = self._features(batch.taps)
        position, document = batch.position, batch.document
        visible = (document[anchors][:, None] == document) & (position < position[anchors][:, None])
        ids = torch.full((anchors.numel(), self.block_size), self.mask_token_id, device=anchors.device)
        ids[:, 0] = batch.tokens[anchors]
        places = position[anchors][:, None] + torch.arange(self.block_size, device=anchors.device)
        turns = self.rotary(position), self.rotary(places)
        stream = self.vocabulary.embed(ids)
        for layer in self.layers:
            keys, values = layer.self_attn.keys_values(context, *turns[0])
            stream = layer(stream, keys, values, visible, turns[1])
        return self.norm(stream)[:, self.first_slot:]

    def _features(self, taps: Tensor) -> Tensor:
        """Context features [T, H] of taps [T, layers * hidden] in any dtype."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def new_context(self) -> BlockContext:
        shape = self.geometry
        empty = torch.zeros(0, shape["num_key_value_heads"], shape["head_dim"],
                            device=self.vocabulary.ids.device)
        count = len(self.layers)
        return BlockContext([empty] * count, [empty] * count, 0)

    @torch.no_grad()
    def extend(self, context: BlockContext, tokens: Sequence[int], taps: Tensor) -> BlockContext:
        features = self._features(taps)
        cos, sin = self.rotary(torch.arange(context.length, context.length + len(taps), device=taps.device))
        made = [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]
        keys = [torch.cat([old, new]) for old, (new, _) in zip(context.keys, made, strict=True)]
        values = [torch.cat([old, new]) for old, (_, new) in zip(context.values, made, strict=True)]
        return BlockContext(keys, values, context.length + len(taps))

    @torch.no_grad()
    def block(self, context: BlockContext, anchor: int, length: int) -> Tensor:
        """Hidden states [length, H] of the predicting slots after `anchor`, as a server computes them."""
        device = self.vocabulary.ids.device
        slots = length + self.first_slot
        ids = torch.full((1, slots), self.mask_token_id, device=device)
        ids[0, 0] = anchor
        places = context.length + torch.arange(slots, device=device)[None]
        visible = torch.ones(1, context.length, dtype=torch.bool, device=device)
        stream = self.vocabulary.embed(ids).to(self.fc.weight.dtype)
        for layer, keys, values in zip(self.layers, context.keys, context.values, strict=True):
            stream = layer(stream, keys, values, visible, self.rotary(places))
        return self.norm(stream)[0, self.first_slot:]

    @classmethod
    def restored(cls, exported: Exported, config: dict[str, Any], mask_token_id: int, taps: Sequence[int],
                 head: TargetHead, **settings: Any) -> Self:
        """A drafter for use, from a folder's geometry, keys and tensors, and the `settings` of its method."""
        return cls.filled(exported, head, mask_token_id, block_size=config["block_size"], tap_layers=taps,
                          start_layers=(), start_from=None, **settings)
