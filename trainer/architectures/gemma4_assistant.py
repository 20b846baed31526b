"""The Gemma 4 assistant: a small decoder that drafts token by token and keeps nothing, since its layers read
the keys and values of the target.

After committed tokens 0..p it reads the token p + 1 and the target's last state at p, normed, and predicts
token p + 2; later steps read the drafted token and `post_projection` of the assistant's own last state.
Whatever the step, queries stand at position p and see the target's keys up to p: drafted tokens never become
keys. A layer reads the keys of the target's last layer of its kind of attention that has its own. Served as
vLLM's method `mtp` (`model_executor/models/gemma4_mtp.py`); the parameters bear the names of its checkpoints
(there with `model.` before most of them).

Training unrolls `steps` of it at anchors drawn in the answers, on true tokens, from what the target in this
process gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.architectures.anchored import QUIET, Anchored
from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.centroids import CentroidHead
from trainer.architectures.gemma4_geometry import (
    FULL,
    SLIDING,
    assistant_config,
    assistant_geometry,
    attention_shape,
    difference,
    own_kinds,
    require_gemma4,
    served_name,
)
from trainer.architectures.gemma4_layers import QueryLayer, Sight
from trainer.architectures.layers import RMSNorm, Rotary
from trainer.architectures.losses import CrossEntropy, Objective
from trainer.architectures.tensors import differences
from trainer.architectures.vocabulary import counts_from
from trainer.errors import UserError
from trainer.kernels.select import BlockAttention, block_attention
from trainer.ranges import Count, Filled, NotNegative, Seed, Text
from trainer.records import Batch, KeysValues, LastState, Tap
from trainer.target_head import TargetHead

Kinds = Annotated[list[Literal["sliding_attention", "full_attention"]], Filled()]


@dataclass
class SharedContext:
    """What the target gave for the committed tokens, [tokens, width of all taps]."""

    taps: Tensor


class Gemma4Assistant(Anchored):
    """`layer_types` are the kinds of its layers, `hidden_size`, `heads` and `intermediate_size` its own.
    `num_centroids` clusters of the vocabulary (null: none, every token has a logit), of which
    `centroid_top_k` are scored; `centroid_weight` is that of the loss by which they learn. `start_from` is
    the folder of an assistant. With it, or without a `seed`, nothing is drawn: the tensors are filled in."""

    method = "mtp"
    formats = ("native",)
    first_anchor = 1  # a draft reads the state of the token before

    def __init__(self, context: DraftContext, layer_types: Kinds, hidden_size: Count, heads: Count,
                 intermediate_size: Count, steps: Count, anchors: Count | None, objective: Objective,
                 num_centroids: Count | None, centroid_top_k: Count, centroid_weight: NotNegative,
                 start_from: Text | None, loss_chunk: Count, attention: BlockAttention,
                 seed: Seed | None) -> None:
        super().__init__(context, (), None, objective, anchors, loss_chunk)
        self.tap_layers = _taps(layer_types)
        self.max_k = self.steps = steps
        self.geometry = assistant_geometry(context.config, layer_types, hidden_size, heads, intermediate_size)
        self.centroid_weight = centroid_weight
        shape, backbone, attend = self.geometry, context.head.hidden_size, block_attention(attention)
        self.embed_scale, eps = backbone ** 0.5, shape["rms_norm_eps"]
        self.kinds = {kind: attention_shape(shape, kind) for kind in sorted({*layer_types})}
        with torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            self.embed_tokens = nn.Embedding(shape["vocab_size"], hidden_size)  # the rows of the head
            self.embed_tokens.weight.is_table = True  # not for optimizers of matrices
            self.pre_projection = nn.Linear(2 * backbone, hidden_size, bias=False)
            self.post_projection = nn.Linear(hidden_size, backbone, bias=False)
            self.layers = nn.ModuleList(QueryLayer(shape, kind, attend) for kind in layer_types)
            self.norm = RMSNorm(hidden_size, eps)
            self.masked_embedding = None if num_centroids is None else \
                CentroidHead(hidden_size, shape["vocab_size"], num_centroids, centroid_top_k)
            self.rotary = nn.ModuleDict({kind: Rotary(size, shape["rope_parameters"][kind],
                                                      shape["max_position_embeddings"])
                                         for kind, (_, size) in self.kinds.items()})
            if seed is not None and start_from is None:
                self._start()
        self.extra_terms = () if self.masked_embedding is None else ("centroids",)

    @torch.no_grad()
    def _start(self) -> None:
        """Random, but for the head: the target's, seen from a random subspace, so that tokens that are near
        each other there are so here."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        backbone, hidden = self.head.hidden_size, self.geometry["hidden_size"]
        axes = torch.linalg.qr(torch.randn(max(backbone, hidden), min(backbone, hidden))).Q
        axes = axes if hidden <= backbone else axes.T
        self.embed_tokens.weight.copy_(self.head.head.float() @ axes)
        self.norm.weight.fill_(QUIET * float((self.head.norm.float() + self.head.norm_offset).abs().mean()))
        if self.masked_embedding is not None:
            self.masked_embedding.start(self.embed_tokens.weight)

    @classmethod
    def longest_draft(cls, **settings: Any) -> int:
        return settings["steps"]

    @classmethod
    def reads(cls, **settings: Any) -> tuple[tuple[Tap, ...], bool]:
        return _taps(settings["layer_types"]), settings["objective"].needs_teacher

    @classmethod
    def check(cls, **settings: Any) -> dict[str, str]:
        found, clusters, chosen = {}, settings["num_centroids"], settings["centroid_top_k"]
        if settings["layer_types"][-1] != FULL:
            found["layer_types"] = (f"must end with {FULL}, as servers take the last layer for one, but ends "
                                    f"with {settings['layer_types'][-1]}")
        if clusters is not None and chosen > clusters:
            found["centroid_top_k"] = (f"must be at most num_centroids, the {clusters} clusters that there "
                                       f"are, but is {chosen}")
        return found

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        require_gemma4(config)
        found, kinds = super().fits(config, special_ids, device, **settings), {*settings["layer_types"]}
        rows, clusters = config["vocab_size"], settings["num_centroids"]
        if absent := kinds - {*own_kinds(config)}:
            found["layer_types"] = (f"names {', '.join(sorted(absent))}, of which the target has no layer "
                                    "with keys and values of its own")
        groups = [attention_shape(config, kind)[0] for kind in sorted(kinds - absent)]
        if any(settings["heads"] % count for count in groups):
            found["heads"] = (f"must be a multiple of the target's heads of keys and values "
                              f"({', '.join(map(str, groups))})")
        if clusters is not None and rows % clusters:
            found["num_centroids"] = f"does not divide the target's {rows} tokens into clusters of equal size"
        return found

    @classmethod
    def initial_folder(cls, **settings: Any) -> str | None:
        return settings["start_from"]

    @classmethod
    def start_problem(cls, given: dict[str, Any], config: dict[str, Any], mask_token_id: int,
                      **settings: Any) -> str | None:
        text = assistant_geometry(config, *(settings[name] for name in (
            "layer_types", "hidden_size", "heads", "intermediate_size")))
        return difference(given, assistant_config(text, config["hidden_size"], settings["num_centroids"],
                                                  settings["centroid_top_k"]))

    @torch.no_grad()
    def begin_with(self, tensors: dict[str, Tensor]) -> None:
        own = {served_name(name): parameter for name, parameter in self.named_parameters()}
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"  # one tensor, which some write twice
        wrong = differences({**own, head: own[embedding]}, tensors, optional=[head])
        if wrong:
            raise ValueError(f"{len(wrong)} of its tensors are not those that its config.json promises "
                             f"({'; '.join(wrong[:3])}); fetch it again")
        if head in tensors and not torch.equal(tensors[head], tensors[embedding]):
            raise ValueError(f"its {head} is not its {embedding}, which a server takes for both; fetch it "
                             "again")
        tensors = {name: tensor for name, tensor in tensors.items() if name != head}
        order = tensors.get("masked_embedding.token_ordering")
        if order is not None and not torch.equal(order.sort().values, torch.arange(len(order)).to(order)):
            raise ValueError(f"its masked_embedding.token_ordering does not name each of the {len(order)} "
                             "tokens once; fetch it again")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def drafted(self, batch: Batch, anchors: Tensor) -> Tensor:
        document, position = batch.document, batch.position
        before = (anchors - 1).clamp(min=0)
        row = torch.arange(document.numel(), device=document.device)
        seen = (document[before][:, None] == document) & (row <= before[:, None])
        states, shared = self._read(batch.taps)
        sight = self._sight(shared, seen, row, before, position[before])
        fed, outputs = states[before][:, None], []
        for step in range(self.steps):
            places = (anchors + step).clamp(max=document.numel() - 1)
            found, fed = self._step(batch.tokens[places][:, None], fed, sight)
            outputs.append(found[:, 0])
        return torch.stack(outputs, dim=1)

    def _read(self, taps: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The target's normed last states [T, H of the target], and keys and values by kind, of taps."""
        last, *others = taps.split(self._widths(), dim=-1)
        shared = {}
        for (kind, (_, size)), both in zip(self.kinds.items(), others, strict=True):
            keys, values = (each.unflatten(-1, (-1, size)) for each in both.chunk(2, dim=-1))
            shared[kind] = keys, values
        return self.head.normed(last).to(self.pre_projection.weight.dtype), shared

    def _widths(self) -> list[int]:
        return [self.head.hidden_size, *(2 * groups * size for groups, size in self.kinds.values())]

    def _sight(self, shared: dict[str, tuple[Tensor, Tensor]], seen: Tensor, row: Tensor, before: Tensor,
               position: Tensor) -> Sight:
        """For drafts behind the rows `before` [A] at `position` [A], which see rows `seen` [A, T] of those
        numbered in `row` [T]; sliding attention only the newest ones."""
        near = seen & (row > before[:, None] - self.geometry["sliding_window"])
        return Sight(shared, {kind: near if kind == SLIDING else seen for kind in self.kinds},
                     {kind: rotary(position[:, None]) for kind, rotary in self.rotary.items()})

    def _step(self, tokens: Tensor, fed: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """States [A, 1, H] for the head, and what the next step is fed with, [A, 1, H of the target], after
        `tokens` [A, 1] with `fed`."""
        token = self.vocabulary.embed(tokens) * self.embed_scale
        stream = self.pre_projection(torch.cat([token, fed.to(token.dtype)], dim=-1))
        for layer in self.layers:
            stream = layer(stream, sight)
        normed = self.norm(stream)
        return normed, self.post_projection(normed)

    def row_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Of all tokens, also where a server scores some of them: a choice teaches nothing."""
        logits = F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))
        cap = self.geometry["final_logit_softcapping"]
        return logits if cap is None or self.masked_embedding is not None else torch.tanh(logits / cap) * cap

    def row_losses(self, hidden: Tensor, logits: Tensor, previous: Tensor, labels: Tensor,
                   teacher: Tensor | None) -> Tensor:
        if self.masked_embedding is None:
            return super().row_losses(hidden, logits, previous, labels, teacher)
        return self.centroid_weight * self.masked_embedding.losses(hidden, labels)[:, None]

    def chosen(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        return self._masked(hidden, logits).argmax(-1)

    def _masked(self, hidden: Tensor, logits: Tensor) -> Tensor:
        return logits if self.masked_embedding is None else self.masked_embedding.masked(hidden, logits)

    def new_context(self) -> SharedContext:
        return SharedContext(torch.zeros(0, sum(self._widths()), device=self.vocabulary.ids.device))

    @torch.no_grad()
    def extend(self, context: SharedContext, tokens: Sequence[int], taps: Tensor) -> SharedContext:
        return SharedContext(torch.cat([context.taps.to(taps), taps]))

    @torch.no_grad()
    def draft_logits(self, context: SharedContext, anchor: int, length: int) -> Tensor:
        count, device = len(context.taps), context.taps.device
        assert count, "a draft needs at least one committed token"
        states, shared = self._read(context.taps)
        row, before = torch.arange(count, device=device), torch.tensor([count - 1], device=device)
        seen = torch.ones(1, count, dtype=torch.bool, device=device)
        sight = self._sight(shared, seen, row, before, before)
        fed, found = states[-1:][:, None], []
        for _ in range(length):
            hidden, fed = self._step(torch.tensor([[anchor]], device=device), fed, sight)
            logits = self.row_logits(hidden[:, 0], before)
            found.append(self._masked(hidden[:, 0], logits)[0])
            anchor = int(found[-1].argmax())
        return torch.stack(found)

    def parts(self, taps: Tensor) -> dict[str, Tensor]:
        return {str(tap): part for tap, part in zip(self.tap_layers, taps.split(self._widths(), dim=-1),
                                                    strict=True)}

    def export(self) -> Exported:
        weights = {served_name(name): parameter.detach() for name, parameter in self.named_parameters()}
        ordered = self.masked_embedding
        config = assistant_config(self.geometry, self.head.hidden_size, ordered.clusters if ordered else None,
                                  ordered.chosen if ordered else 1)
        return Exported(weights, {"text_config": config.pop("text_config")}, {"native": config})

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config, text = exported.flavours[flavour], exported.geometry["text_config"]
        for key, found, expected in (("backbone_hidden_size", config["backbone_hidden_size"],
                                      head.hidden_size), ("vocab_size", text["vocab_size"], head.vocab_size)):
            if found != expected:
                raise UserError(f"the assistant's config.json says {key} {found}, and its target has "
                                f"{expected}: it belongs to another one; export it again")
        weights = dict(exported.weights)
        counts = counts_from(weights, head.vocab_size, head.vocab_size)
        weights.pop("lm_head.weight", None)  # tied
        clusters = config["num_centroids"] if config["use_ordered_embeddings"] else None
        drafter = cls(DraftContext(text, head, 0, counts, (), {}), text["layer_types"], text["hidden_size"],
                      text["num_attention_heads"], text["intermediate_size"], steps=1, anchors=0,
                      objective=Objective([CrossEntropy()]), num_centroids=clusters,
                      centroid_top_k=config["centroid_intermediate_top_k"], centroid_weight=1.0,
                      start_from=None, loss_chunk=1, attention="reference", seed=None)
        drafter.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
        return drafter.eval().requires_grad_(False)


def _taps(layer_types: Sequence[str]) -> tuple[Tap, ...]:
    return LastState(), *(KeysValues(kind) for kind in sorted({*layer_types}))
