"""EAGLE-3: one small decoder that drafts token by token, from the target's fused hidden states.

The pair at index j is (token j + 1, g_j), g_j = fc(taps_j); it predicts token j + 2. Later steps of a draft
read the drafted token and the layer's own output in place of g. Keys of committed tokens come from true
pairs, those of a draft from its own chain; training unrolls `steps` of it with exactly these keys
("training-time test", EAGLE-3 paper; arXiv 2503.01840). Served as vLLM's method `eagle3`
(`model_executor/models/llama_eagle3.py`, `qwen3_eagle3.py`).

Only the drafts at the drawn anchors are computed behind the keys: with one layer nothing else reads the other
positions' outputs. `anchors: null` takes every position, as other trainers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer.architectures import warm_start
from trainer.architectures.anchored import Anchored
from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.geometry import geometry
from trainer.architectures.layers import GatedMLP, RMSNorm, Rotary, rotate
from trainer.architectures.losses import Objective
from trainer.kernels.select import BlockAttention, block_attention
from trainer.ranges import Count, Layers, Seed, Text
from trainer.records import Batch
from trainer.target_head import TargetHead

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Turns = tuple[Tensor, Tensor]  # cos and sin


@dataclass
class PairContext:
    """Keys and values of the pairs of committed tokens, for each layer [pairs, kv_heads, head_dim], and the
    feature [1, H] that waits for the token after it."""

    keys: list[Tensor]
    values: list[Tensor]
    waiting: Tensor | None


class Eagle3(Anchored):
    """`steps` drafted tokens are trained. `style` is the layer's layout: `qwen3` norms queries and keys by
    head. EAGLE-3.1: `fc_norm` norms each tapped layer, `norm_output` feeds back the normed output;
    `norm_before_fc` norms all of them together, `norm_before_residual` takes the residual behind the norm.
    `start_from` is the folder of an exported one that training begins with. With `train_head` its head begins
    as the target's rows and is trained, as in EAGLE's own code (a server reads it either way)."""

    method = "eagle3"
    other_formats = ("deepspec", "sglang")
    scales = True
    first_anchor = 1  # its pair has the feature of the token before

    def __init__(self, context: DraftContext, layers: Count, steps: Count, anchors: Count | None,
                 tap_layers: Layers, draft_vocab_size: Count | None, intermediate_size: Count | None,
                 style: Literal["llama", "qwen3"], norm_before_residual: bool, norm_before_fc: bool,
                 fc_norm: bool, norm_output: bool, objective: Objective, start_from: Text | None,
                 loss_chunk: Count, attention: BlockAttention, seed: Seed, train_head: bool) -> None:
        super().__init__(context, tap_layers, draft_vocab_size, objective, anchors, loss_chunk, train_head)
        self.max_k = self.steps = steps
        flags, self.style = (norm_before_residual, norm_before_fc, fc_norm, norm_output), style
        self.flags = dict(zip(FLAGS, flags, strict=True))
        self.geometry = geometry(context.config, layers, intermediate_size, model_type=style)
        shape, target_size = self.geometry, context.head.hidden_size
        hidden, eps, count = shape["hidden_size"], shape["rms_norm_eps"], len(self.tap_layers)
        attend = block_attention(attention)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc = nn.Linear(count * target_size, hidden, bias=False)
            if norm_before_fc:
                self.input_norm = RMSNorm(count * target_size, eps)
            if fc_norm:
                self.fc_norm = nn.ModuleList(RMSNorm(target_size, eps) for _ in range(count))
            self.layers = nn.ModuleList(PairLayer(shape, style == "qwen3", index == 0, norm_before_residual,
                                                  attend) for index in range(layers))
            self.norm = RMSNorm(hidden, eps)
            self.rotary = Rotary(shape["head_dim"], shape["rope_parameters"],
                                 shape["max_position_embeddings"])
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        self._start_norm(self.norm)

    @classmethod
    def longest_draft(cls, **settings: Any) -> int:
        return settings["steps"]

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        both = settings["fc_norm"] and settings["norm_before_fc"]
        return {"fc_norm": "must be false beside norm_before_fc, as both norm what fc reads"} if both else {}

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        shape = geometry(config, settings["layers"], settings["intermediate_size"])
        Rotary(shape["head_dim"], shape["rope_parameters"], shape["max_position_embeddings"])
        return super().fits(config, special_ids, device, **settings)

    @classmethod
    def initial_folder(cls, **settings: Any) -> str | None:
        return settings["start_from"]

    @classmethod
    def start_problem(cls, given: dict[str, Any], config: dict[str, Any], mask_token_id: int,
                      **settings: Any) -> str | None:
        own = geometry(config, settings["layers"], settings["intermediate_size"], settings["style"])
        flags = {name: settings[name] for name in FLAGS}
        return warm_start.chain_difference(given, own, sorted(settings["tap_layers"]), flags)

    def begin_with(self, tensors: dict[str, Tensor]) -> None:
        warm_start.copy_chain(self, tensors)

    def features(self, taps: Tensor) -> Tensor:
        """g [T, H] of taps [T, layers * hidden] in any dtype."""
        taps = taps.to(self.fc.weight.dtype)
        if self.flags["norm_before_fc"]:
            taps = self.input_norm(taps)
        if self.flags["fc_norm"]:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def drafted(self, batch: Batch, anchors: Tensor) -> Tensor:
        document, position = batch.document, batch.position
        pairs = (anchors - 1).clamp(min=0)  # of which the anchor is the token
        row = torch.arange(document.numel(), device=document.device)
        stream = self.features(batch.taps)
        token = self.vocabulary.embed(batch.tokens.roll(-1))
        turns = self.rotary(position)
        known, every = [], (document[:, None] == document) & (row <= row[:, None])
        for layer in self.layers[:-1]:
            known.append(layer.keys_values(stream, token, turns))
            stream = layer(stream[:, None], token[:, None], *known[-1], (), every,
                           tuple(turn[:, None] for turn in turns))[:, 0]
        known.append(self.layers[-1].keys_values(stream, token, turns))
        seen = (document[pairs][:, None] == document) & (row <= pairs[:, None])
        # the first step of the lower layers was made for every position; the last layer's for the anchors
        fed, chains = stream[pairs], [[] for _ in self.layers]
        outputs = []
        for step in range(self.steps):
            places = (anchors + step).clamp(max=document.numel() - 1)
            token_now = self.vocabulary.embed(batch.tokens[places])[:, None]
            turned = self.rotary((position[pairs] + step)[:, None])
            state = fed[:, None]
            for index, layer in enumerate(self.layers):
                if step == 0 and index < len(self.layers) - 1:
                    continue
                if step:
                    chains[index].append(layer.keys_values(state, token_now, turned))
                state = layer(state, token_now, *known[index], chains[index], seen, turned)
            normed = self.norm(state)
            fed = (normed if self.flags["norm_output"] else state)[:, 0]
            outputs.append(normed[:, 0])
        return torch.stack(outputs, dim=1)

    def new_context(self) -> PairContext:
        shape = self.geometry
        empty = torch.zeros(0, shape["num_key_value_heads"], shape["head_dim"],
                            device=self.vocabulary.ids.device)
        return PairContext([empty] * len(self.layers), [empty] * len(self.layers), None)

    @torch.no_grad()
    def extend(self, context: PairContext, tokens: Sequence[int], taps: Tensor) -> PairContext:
        features = self.features(taps)
        waiting, ids = features[-1:], torch.tensor(tokens, device=features.device)
        if context.waiting is None:
            features, ids = features[:-1], ids[1:]
        else:
            features = torch.cat([context.waiting, features[:-1]])
        if not len(ids):
            return PairContext(context.keys, context.values, waiting)
        start = len(context.keys[0])
        places = torch.arange(start, start + len(ids), device=features.device)
        visible = torch.arange(start + len(ids), device=features.device) <= places[:, None]
        turns = self.rotary(places)
        token, keys, values, stream = self.vocabulary.embed(ids), [], [], features
        for index, layer in enumerate(self.layers):
            made = layer.keys_values(stream, token, turns)
            keys.append(torch.cat([context.keys[index], made[0]]))
            values.append(torch.cat([context.values[index], made[1]]))
            if index < len(self.layers) - 1:
                stream = layer(stream[:, None], token[:, None], keys[-1], values[-1], (), visible,
                               tuple(turn[:, None] for turn in turns))[:, 0]
        return PairContext(keys, values, waiting)

    @torch.no_grad()
    def draft_logits(self, context: PairContext, anchor: int, length: int) -> Tensor:
        assert context.waiting is not None, "a draft needs at least one committed token"
        device, start = context.waiting.device, len(context.keys[0])
        seen = torch.ones(1, start, dtype=torch.bool, device=device)
        fed, chains, found = context.waiting, [[] for _ in self.layers], []
        for step in range(length):
            token = self.vocabulary.embed(torch.tensor([[anchor]], device=device))
            turns = self.rotary(torch.tensor([[start + step]], device=device))
            state = fed[:, None]
            for index, layer in enumerate(self.layers):
                chains[index].append(layer.keys_values(state, token, turns))
                state = layer(state, token, context.keys[index], context.values[index], chains[index], seen,
                              turns)
            normed = self.norm(state)
            fed = (normed if self.flags["norm_output"] else state)[:, 0]
            found.append(self.vocabulary.logits(normed[0, 0]))
            anchor = int(self.vocabulary.ids[found[-1].argmax()])
        return torch.stack(found)

    def export(self) -> Exported:
        weights = {name: parameter.detach() for name, parameter in self.named_parameters()
                   if not name.startswith("vocabulary.")}
        taps = list(self.tap_layers)
        shared = {"draft_vocab_size": self.vocabulary.ids.numel(), "eagle_aux_hidden_state_layer_ids": taps,
                  **self.flags}
        if self.head.hidden_size != self.geometry["hidden_size"]:  # null is an error in one class of servers
            shared["target_hidden_size"] = self.head.hidden_size
        name = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}[self.style]
        speculators = {"speculators_model_type": "eagle3", "architectures": [name], **shared}
        # the Llama class takes the number of tapped layers from this key alone
        shape = {**self.geometry, "num_aux_hidden_states": len(taps)}
        return Exported(weights | self.vocabulary.exported(), shape,
                        {"speculators": speculators, "native": {"architectures": [name], **shared}})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config = exported.flavours[flavour]
        flags = {name: config[name] for name in FLAGS}
        return cls.filled(exported, head, mask_token_id=0, steps=1, train_head=False, start_from=None,
                          style=exported.geometry["model_type"],
                          tap_layers=config["eagle_aux_hidden_state_layer_ids"],
                          draft_vocab_size=config["draft_vocab_size"], **flags)


class PairLayer(nn.Module):
    """One decoder layer; the first one reads token and feature side by side, the others only the stream."""

    def __init__(self, shape: dict[str, Any], head_norms: bool, first: bool, norm_before_residual: bool,
                 attend: Callable[..., Tensor]) -> None:
        super().__init__()
        hidden, eps = shape["hidden_size"], shape["rms_norm_eps"]
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps) if first else None
        self.self_attn = PairAttention(shape, head_norms, 2 * hidden if first else hidden, attend)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, shape["intermediate_size"])

    def inputs(self, stream: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual, of a stream [..., H] with token embeddings [..., H]."""
        if self.hidden_norm is None:
            return self.input_layernorm(stream), stream
        normed = self.hidden_norm(stream)
        both = torch.cat([self.input_layernorm(token).to(normed.dtype), normed], dim=-1)
        return both, normed if self.norm_before_residual else stream

    def keys_values(self, stream: Tensor, token: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., kv_heads, D] of pairs [..., H] at the positions of `turns`."""
        return self.self_attn.keys_values(self.inputs(stream, token)[0], turns)

    def forward(self, stream: Tensor, token: Tensor, keys: Tensor, values: Tensor,
                chain: Sequence[tuple[Tensor, Tensor]], visible: Tensor, turns: Turns) -> Tensor:
        """stream, token [A, 1, H]; keys, values [T, kv_heads, D] of committed pairs, of which each draft sees
        those `visible` [A, T]; `chain` holds the keys and values [A, 1, kv_heads, D] of its own steps."""
        read, residual = self.inputs(stream, token)
        stream = residual + self.self_attn(read, keys, values, chain, visible, turns)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class PairAttention(nn.Module):
    def __init__(self, shape: dict[str, Any], head_norms: bool, width: int,
                 attend: Callable[..., Tensor]) -> None:
        super().__init__()
        size, hidden = shape["head_dim"], shape["hidden_size"]
        self.size, self.attend = size, attend
        self.q_proj = nn.Linear(width, shape["num_attention_heads"] * size, bias=False)
        self.k_proj = nn.Linear(width, shape["num_key_value_heads"] * size, bias=False)
        self.v_proj = nn.Linear(width, shape["num_key_value_heads"] * size, bias=False)
        self.o_proj = nn.Linear(shape["num_attention_heads"] * size, hidden, bias=False)
        if head_norms:
            self.q_norm = RMSNorm(size, shape["rms_norm_eps"])
            self.k_norm = RMSNorm(size, shape["rms_norm_eps"])
        self.head_norms = head_norms

    def keys_values(self, read: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(read).unflatten(-1, (-1, self.size))
        if self.head_norms:
            keys = self.k_norm(keys)
        return rotate(keys, *turns), self.v_proj(read).unflatten(-1, (-1, self.size))

    def forward(self, read: Tensor, keys: Tensor, values: Tensor, chain: Sequence[tuple[Tensor, Tensor]],
                visible: Tensor, turns: Turns) -> Tensor:
        query = self.q_proj(read).unflatten(-1, (-1, self.size))
        if self.head_norms:
            query = self.q_norm(query)
        own = [torch.cat(each, dim=1) for each in zip(*chain, strict=True)] if chain else \
            [keys.new_zeros(len(read), 0, *keys.shape[1:])] * 2
        return self.o_proj(self.attend(rotate(query, *turns), keys, values, *own, visible).flatten(-2))
