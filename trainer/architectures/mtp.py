"""Native multi-token prediction (MTP): the small module that a target brings along, or gets, drafts token by
token from the target's last hidden state.

The pair at index j is (token j + 1, s_j), s_j the target's last state; it predicts token j + 2. Later steps
of a draft read the drafted token and the module's own output in place of s, through the same layer. Keys of
committed tokens come from true pairs, those of a draft from its own chain: training unrolls `steps` of it
with exactly these keys, as EAGLE-3 is trained, and weighs them as FastMTP does (arXiv 2509.18362). Where a
target has several modules, the next one takes a step instead: it reads (token j + 2, the output of the one
before at j), at every j, and predicts token j + 3 (DeepSeek-V3, arXiv 2412.19437). Embedding and head are the
target's, frozen. Served as vLLM's method `mtp` from the target's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer.architectures.anchored import Anchored
from trainer.architectures.base import DraftContext, Exported
from trainer.architectures.losses import CrossEntropy, Objective
from trainer.architectures.mtp_layouts import (
    LAYOUTS,
    MIMO,
    apart,
    fused,
    layout_of,
    served_as,
    split,
    unlike_mimo,
)
from trainer.architectures.mtp_module import Module, Pairs, promised
from trainer.architectures.tensors import FLOATS, differences
from trainer.ranges import Count, Layers, Seed
from trainer.records import Batch
from trainer.target_head import TargetHead


@dataclass
class MtpContext:
    """For each module the pairs whose token is committed, and the state [1, H] that waits for its token ([0,
    H] while there is none)."""

    pairs: list[Pairs]
    waiting: list[Tensor]


class Mtp(Anchored):
    """`steps` drafted tokens are trained. `start` is what training begins with: the target's `own` module, a
    `random` one, or a `copy` of the target's last layer."""

    method = "mtp"
    formats = ("stitched", "changes")
    needs = ("an MTP module lives inside its target, which must bring one, or be a Llama or a Qwen2 that "
             "gets a new one: take recipe=mtp_smollm2, or set what it sets (export.formats, evaluate.format, "
             "drafter.start, and in target.tap_layers the target's last layer alone)")
    first_anchor = 1  # its pair has the state of the token before

    def __init__(self, context: DraftContext, steps: Count, anchors: Count | None, tap_layers: Layers,
                 start: Literal["own", "random", "copy"], objective: Objective, loss_chunk: Count,
                 seed: Seed) -> None:
        super().__init__(context, tap_layers, None, objective, anchors, loss_chunk)
        self.max_k = self.steps = steps
        self.config, self.layout = context.config, layout_of(context.config)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.heads = nn.ModuleList(Module(self.layout, self.config)
                                       for _ in range(self.layout.modules(self.config)))
            for name, parameter in self.heads.named_parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)
                elif name.endswith(".bias"):
                    nn.init.zeros_(parameter)
        self.needs_v2 = len(self.heads) > 1  # Model Runner V1 has the first take every step
        own = _own(self.config, context.own_tensors)
        self.split_experts = apart(own)
        if start == "own":
            self._fill(own)
            return
        if start == "random":
            self._start_norm(self.norm)
        else:
            layer = context.layer_tensors[-1]
            self._fill({f"0.block.{name}": tensor for name, tensor in layer.items()}, some=True)
            self._start_norm(self.norm, 1.0)
            with torch.no_grad():
                self.heads[0].input_proj.weight[:, :self.head.hidden_size] += torch.eye(self.head.hidden_size)

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor], some: bool = False) -> None:
        """Takes the weights of `tensors`, in our names: all of the module, or `some`."""
        if problem := _difference(self.heads, tensors, some):
            raise ValueError(problem)
        values = self.heads.state_dict()
        for name, tensor in fused(tensors).items():
            values[name].copy_(tensor)

    @property
    def norm(self) -> nn.Module:
        return self.heads[0].norm

    @classmethod
    def reads(cls, **settings: Any) -> tuple[tuple[int, ...], bool]:
        return tuple(settings["tap_layers"]), settings["objective"].needs_teacher

    @classmethod
    def longest_draft(cls, **settings: Any) -> int:
        return settings["steps"]

    @classmethod
    def initial_layers(cls, **settings: Any) -> tuple[int, ...]:
        return (-1,) if settings["start"] == "copy" else ()

    @classmethod
    def own_prefixes(cls, config: dict[str, Any], **settings: Any) -> tuple[str, ...]:
        return layout_of(config).prefixes(config) if settings["start"] == "own" else ()

    @classmethod
    def fits(cls, config: dict[str, Any], special_ids: Sequence[int], device: str | None,
             **settings: Any) -> dict[str, str]:
        layout, last = layout_of(config), config["num_hidden_layers"]
        found = super().fits(config, special_ids, device, **settings)
        if list(settings["tap_layers"]) != [last]:
            found["tap_layers"] = (f"must be [{last}], the state behind the target's last layer, which a "
                                   f"server hands to its MTP module; set target.tap_layers=[{last}]")
        if 1 < (count := layout.modules(config)) < settings["steps"]:
            found["steps"] = (f"must be at most {count}, the target's MTP modules ({layout.count} in its "
                              "config.json), of which each drafts one token")
        elif problem := cls.served_problem(config, settings["steps"], **settings):
            found["steps"] = problem
        if not found:
            promised(config)
        if settings["start"] == "own":
            return found
        if layout is not MIMO:
            found["start"] = ("must be own: only a Llama or a Qwen2 can be served with a new module, in the "
                              "layout of MiMo")
        elif unlike := unlike_mimo(config):
            raise ValueError(f"the target cannot be served with a new MTP module, in the layout of MiMo, as "
                             f"its config.json says {unlike}; set drafter=eagle3 or drafter=dflash")
        return found

    @classmethod
    def served_problem(cls, config: dict[str, Any], k: int, **settings: Any) -> str | None:
        layout = LAYOUTS.get(config.get("model_type"))
        count = {**config, **served_as(config)[0]}.get(layout.count) or 1 if layout else 1
        if not isinstance(count, int) or k <= count or k % count == 0:  # what is no number, `fits` tells
            return None
        return (f"must be at most {count} or a multiple of it, since vLLM takes no other draft length of a "
                f"target with {count} MTP layers ({layout.count} in its config.json)")

    @classmethod
    def nested_problem(cls, **settings: Any) -> str | None:
        return None if settings["start"] == "own" else (
            "its text part is nested in the config.json of a multimodal model, and a new MTP module can only "
            "be served inside a text model, as a MiMo; give a folder of the text model alone, or set "
            "drafter=eagle3 or drafter=dflash")

    @classmethod
    def own_problem(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
        if not tensors:
            return ("the target has no MTP module (no tensor of its files begins with "
                    f"{layout_of(config).prefixes(config)[0]}); set drafter.start=random for a Llama or a "
                    "Qwen2, or fetch a checkpoint that has one")
        return _difference(promised(config), _own(config, tensors), False)

    def states(self, taps: Tensor) -> Tensor:
        """s [T, H] float32 of taps [T, H] in any dtype."""
        taps = taps.float()
        return self.head.normed(taps) if self.layout.normed_state else taps

    def drafted(self, batch: Batch, anchors: Tensor) -> Tensor:
        document, position = batch.document, batch.position
        behind = (anchors - 1).clamp(min=0)  # the pairs of which the anchors are the tokens
        row = torch.arange(document.numel(), device=document.device)
        known = (document[:, None] == document) & (row <= row[:, None])
        fed, outputs = self.states(batch.taps), []
        for step, module in enumerate(self.heads[:self.steps]):
            pairs = Pairs()
            token = self.vocabulary.embed(batch.tokens.roll(-1 - step))
            fed, normed = module(fed, token, position, known, pairs)
            outputs.append(normed[behind])
        fed, visible = fed[behind], known[behind]
        own = torch.eye(anchors.numel(), dtype=torch.bool, device=document.device)
        for step in range(len(outputs), self.steps):  # there is one module, and it goes on
            places = (anchors + step).clamp(max=document.numel() - 1)
            visible = torch.cat([visible, own], dim=1)
            fed, normed = module(fed, self.vocabulary.embed(batch.tokens[places]), position[behind] + step,
                                 visible, pairs)
            outputs.append(normed)
        return torch.stack(outputs, dim=1)

    def new_context(self) -> MtpContext:
        empty = torch.zeros(0, self.head.hidden_size, device=self.vocabulary.ids.device)
        return MtpContext([Pairs() for _ in self.heads], [empty] * len(self.heads))

    @torch.no_grad()
    def extend(self, context: MtpContext, tokens: Sequence[int], taps: Tensor) -> MtpContext:
        fed, pairs, waiting = self.states(taps), [each.copy() for each in context.pairs], []
        for number in range(len(self.heads)):
            states = torch.cat([context.waiting[number], fed])
            waiting.append(states[-1:])
            ids = tokens[len(tokens) - len(states[:-1]):]
            fed = self._step(number, states[:-1], ids, pairs[number])[0] if ids else states[:0]
        return MtpContext(pairs, waiting)

    def _step(self, number: int, states: Tensor, ids: Sequence[int], pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The next pairs of a sequence through a module."""
        start, device = len(pairs), states.device
        place = torch.arange(start, start + len(ids), device=device)
        visible = torch.arange(start + len(ids), device=device) <= place[:, None]
        token = self.vocabulary.embed(torch.tensor(ids, device=device))
        return self.heads[number](states, token, place, visible, pairs)

    @torch.no_grad()
    def draft_logits(self, context: MtpContext, anchor: int, length: int) -> Tensor:
        assert len(context.waiting[0]), "a draft needs at least one committed token"
        ids, found, fed = [anchor], [], context.waiting[0][:0]
        for step in range(length):
            if step < len(self.heads):  # all that it has not read, up to the newest token
                pairs, states = context.pairs[step].copy(), torch.cat([context.waiting[step], fed])
            else:
                states = fed[-1:]
            fed, normed = self._step(min(step, len(self.heads) - 1), states, ids[-len(states):], pairs)
            found.append(self.vocabulary.logits(normed[-1]))
            ids.append(int(found[-1].argmax()))
        return torch.stack(found)

    def export(self) -> Exported:
        """Weights under the target's names, with what the target needs besides; the geometry is the target's
        (text) config as a server reads it."""
        own = {name: tensor.detach() for name, tensor in self.heads.state_dict().items()}
        parameters = dict(self.heads.named_parameters())
        if self.split_experts:
            own = split(own)
        named = {name: self.layout.target_name(name, self.config) for name in own}
        changes, needed = served_as(self.config)
        exact = frozenset(named[name] for name in own.keys() - split(parameters).keys() - parameters.keys())
        keys = {"method": self.method, "steps": self.steps, "config_changes": changes}
        return Exported({named[name]: tensor for name, tensor in own.items()} | needed,
                        {**self.config, **changes}, dict.fromkeys(self.formats, keys), exact)

    @classmethod
    def restore(cls, exported: Exported, flavour: str, head: TargetHead) -> Self:
        config, ones = exported.geometry, torch.ones(head.vocab_size, dtype=torch.int64)
        own = layout_of(config).own_names(exported.weights, config)
        context = DraftContext(config, head, 0, ones, (), {}, {name: exported.weights[name] for name in own})
        drafter = cls(context, steps=exported.flavours[flavour]["steps"], anchors=0,
                      tap_layers=[config["num_hidden_layers"]], start="own",
                      objective=Objective([CrossEntropy()]), loss_chunk=1, seed=0)
        return drafter.eval().requires_grad_(False)


def _own(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The modules' among the target's `tensors`, in our names."""
    return {own: tensors[name] for name, own in layout_of(config).own_names(tensors, config).items()}


def _difference(modules: nn.Module, tensors: Mapping[str, Tensor], some: bool) -> str | None:
    """Why the modules cannot have these weights; None when they can."""
    coarse = sorted(name for name, tensor in tensors.items() if tensor.dtype not in FLOATS)
    if coarse:
        return (f"the target's MTP module is quantised ({coarse[0]} is {tensors[coarse[0]].dtype}), so it "
                "cannot be trained and put back; take the checkpoint that is not quantised")
    wanted = modules.state_dict()
    wanted = split(wanted) if apart(tensors) else wanted
    wrong = differences(wanted, tensors, optional=wanted.keys() if some else ())
    return None if not wrong else (
        "the tensors of the target's MTP module are not those that its config.json promises: "
        f"{len(wrong)} differ ({'; '.join(wrong[:3])}); it is of another size or layout, or damaged: fetch "
        "the target again, or choose another one")
