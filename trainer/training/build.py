"""From settings and the target's files to a drafter: used by training, export and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.architectures.base import DraftContext, Drafter
from trainer.errors import UserError
from trainer.ranges import Gives
from trainer.records import Sample
from trainer.target import Target
from trainer.target_head import load_target_head, read_tensors, tensor_names
from trainer.training.checkpoint import load_weights

MakeDrafter = Annotated[partial, Gives(("context",))]  # the drafter's YAML node, waiting for its context


def build_drafter(make: MakeDrafter, target: Target, token_counts: Tensor) -> Drafter:
    """A fresh drafter; the same arguments give the same bits."""
    wanted = wanted_layers(make, target)
    head = load_target_head(target.folder, target.config)
    bos = target.tokenizer.bos_token_id
    special = dict.fromkeys((*target.end_ids, *([] if bos is None else [bos])))
    context = DraftContext(target.config, head, target.mask_token_id, token_counts, tuple(special),
                           {index: _layer(target, index) for index in wanted})
    try:
        return make(context=context)
    except ValueError as error:
        raise UserError(str(error)) from error


def wanted_layers(make: MakeDrafter, target: Target) -> tuple[int, ...]:
    """Layers of the target that the drafter starts from; raises when it has no such layers."""
    wanted, count = make.func.initial_layers(**make.keywords), target.config["num_hidden_layers"]
    for index in wanted:
        if not -count <= index < count:
            raise UserError(f"drafter.start_layers names layer {index}, but {target.name} has {count} layers")
    return wanted


def draft_problem(make: MakeDrafter, k: int) -> str | None:
    """Why the drafter cannot draft `k` tokens, for people; None when it can."""
    shortest, longest = (ask(**make.keywords) for ask in (make.func.shortest_draft, make.func.longest_draft))
    if shortest <= k <= longest:
        return None
    if shortest == longest:
        return f"must be {longest}, since this drafter is served with whole blocks alone, but is {k}"
    return f"must lie between {shortest} and {longest}, the longest draft of this drafter, but is {k}"


def load_trained(make: MakeDrafter, target: Target, folder: Path) -> Drafter:
    """The drafter that the finished train stage in `folder` left, in float32, for use (not training)."""
    counts = load_file(folder / "token_counts.safetensors")["token_counts"]
    drafter = build_drafter(make, target, counts)
    load_weights(drafter, load_file(folder / "weights.safetensors"), folder)
    return drafter.eval().requires_grad_(False)


def save_counts(folder: Path, counts: Tensor) -> None:
    save_file({"token_counts": counts}, folder / "token_counts.safetensors")


def count_tokens(samples: Sequence[Sample], vocab_size: int) -> Tensor:
    """How often each token is supervised, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[torch.tensor(sample.loss_mask)]
        counts += torch.bincount(tokens, minlength=vocab_size)
    return counts


def _layer(target: Target, index: int) -> dict[str, Tensor]:
    """Tensors of the target's 0-based decoder layer `index`, names relative to the layer."""
    part = f"layers.{index % target.config['num_hidden_layers']}."
    names = {name.split(part, 1)[1]: name for name in tensor_names(target.folder)
             if f".{part}" in name and "vision" not in name and "mtp" not in name}
    tensors = read_tensors(target.folder, names.values())
    return {short: tensors[name] for short, name in names.items()}
