"""One physical multi-token prediction layer, put together as its layout says from parts of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.architectures.mtp_layouts import Layout, layer_config, layout_of, served_as, split
from trainer.errors import UNREADABLE

SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# of a decoder config: what changes nothing that an MTP layer computes
IDLE = {"architectures", "transformers_version", "dtype", "use_cache", "bos_token_id", "eos_token_id",
        "pad_token_id", "initializer_range", "tie_word_embeddings", "max_position_embeddings"}


class Pairs:
    """Keys and values of pairs that were read; what transformers calls a cache."""

    def __init__(self, kept: tuple[Tensor, Tensor] | None = None) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return 0 if self.kept is None else self.kept[0].shape[-2]

    def copy(self) -> Pairs:
        return Pairs(self.kept)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Those so far with `keys` and `values` [1, heads, pairs, size] behind them."""
        if self.kept is not None:
            keys, values = (torch.cat(each, dim=-2) for each in zip(self.kept, (keys, values), strict=True))
        self.kept = keys, values
        return keys, values


class Module(nn.Module):
    """One physical MTP layer: reads pairs of a token and a state, in one sequence."""

    def __init__(self, layout: Layout, config: Mapping[str, Any]) -> None:
        super().__init__()
        shape = layer_config(layout, config)
        norm, size = layout.part(f"{layout.classes}RMSNorm"), shape.hidden_size
        self.layout = layout
        self.token_norm, self.state_norm, self.norm = (norm(size, eps=shape.rms_norm_eps) for _ in range(3))
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.block = layout.part(f"{layout.classes}DecoderLayer")(shape, 0)
        self.rotary = layout.part(layout.rotary)(shape)
        names = inspect.signature(self.block.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def forward(self, state: Tensor, token: Tensor, position: Tensor, visible: Tensor,
                pairs: Pairs) -> tuple[Tensor, Tensor]:
        """What is handed to the next step, and what the head reads, both [n, H], of n pairs of state [n, H]
        and token embedding [n, H] at `position` [n]. They join `pairs`, and each sees those of all m in there
        that are `visible` [n, m] bool."""
        if self.layout.blank_start:
            token = token.masked_fill((position == 0)[:, None], 0.0)
        halves = [self.token_norm(token), self.state_norm(state)]
        if self.layout.state_first:
            halves.reverse()
        stream = self.input_proj(torch.cat(halves, dim=-1))[None]
        turns = self.rotary(state.float(), position[None])
        stream = self.block(stream, attention_mask=visible[None, None], position_embeddings=turns,
                            **{self.cache_name: pairs})[0]
        normed = self.norm(stream)
        return normed if self.layout.feeds_normed else stream, normed


def promised(config: Mapping[str, Any]) -> nn.ModuleList:
    """The modules of a target with this (text) config, without values (device meta); ValueError where there
    can be none."""
    from huggingface_hub.errors import StrictDataclassError

    layout = layout_of(config)
    try:
        with torch.device("meta"):
            return nn.ModuleList(Module(layout, config) for _ in range(layout.modules(config)))
    except (*UNREADABLE, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"no MTP module can be made by the target's config.json ({reason}); mend it, or "
                         "fetch it again") from error


def promised_tensors(config: Mapping[str, Any], split_experts: bool) -> dict[str, Tensor]:
    """The tensors of these modules, in the names of the target's files, and those that the target needs
    besides."""
    layout, own = layout_of(config), promised(config).state_dict()
    own = split(own) if split_experts else own
    return {layout.target_name(name, config): tensor for name, tensor in own.items()} | served_as(config)[1]


def unlike(config: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first key in which targets with these (text) configs, as a server reads them, differ so that a
    module of the `other` one does not compute the same; None when there is none."""
    for key in SIZES:
        if config[key] != other.get(key):
            return key
    one, two = (layer_config(layout_of(each), each) for each in (config, other))
    keys = type(one)().to_dict().keys() - IDLE  # none that people added
    return next((key for key in sorted(keys) if getattr(one, key, None) != getattr(two, key, None)), None)
