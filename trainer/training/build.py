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
from trainer.errors import Several, UserError
from trainer.ranges import Gives
from trainer.records import Sample
from trainer.target import Target
from trainer.target_head import load_target_head, read_tensors, tensor_names
from trainer.training.checkpoint import load_weights

MakeDrafter = Annotated[partial, Gives(("context",))]  # the drafter's YAML node, waiting for its context


def build_drafter(make: MakeDrafter, target: Target, token_counts: Tensor) -> Drafter:
    """A fresh drafter; the same arguments give the same bits."""
    require_buildable(make, target, None)
    head = load_target_head(target.folder, target.config)
    context = DraftContext(target.config, head, target.mask_token_id, token_counts, special_ids(target),
                           {index: _layer(target, index) for index in wanted_layers(make, target)})
    try:
        return make(context=context)
    except ValueError as error:
        raise UserError(str(error)) from error


def require_buildable(make: MakeDrafter, target: Target, device: str | None) -> None:
    """Raises when no such drafter can be built for the target, or none be trained on `device` (null: it is
    only used)."""
    wanted_layers(make, target)
    _ = target.mask_token_id
    try:
        found = make.func.fits(target.config, special_ids(target), device, **make.keywords)
    except ValueError as error:
        raise UserError(str(error)) from error
    if found:
        raise Several([f"drafter.{name}={make.keywords[name]} {text}" for name, text in found.items()])


def special_ids(target: Target) -> tuple[int, ...]:
    """Tokens that begin and end texts; every draft vocabulary has them."""
    bos = target.tokenizer.bos_token_id
    return tuple(dict.fromkeys((*target.end_ids, *([] if bos is None else [bos]))))


def wanted_layers(make: MakeDrafter, target: Target) -> tuple[int, ...]:
    """Layers of the target that the drafter starts from; raises when it has no such layers."""
    wanted, count = make.func.initial_layers(**make.keywords), target.config["num_hidden_layers"]
    for index in wanted:
        if not -count <= index < count:
            raise UserError(f"drafter.start_layers names layer {index}, but {target.name} has {count} layers")
    return wanted


def draft_problem(make: MakeDrafter, k: int) -> str | None:
    """Why the drafter cannot draft `k` tokens, for people; None when it can."""
    longest = make.func.longest_draft(**make.keywords)
    return None if 1 <= k <= longest else \
        f"must lie between 1 and {longest}, the longest draft of this drafter, but is {k}"


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
