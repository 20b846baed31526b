"""From settings and the target's files to a drafter: used by training, export and evaluation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer import _folders
from trainer._weight_files import CONVERT, INDEX, indexed, pickles
from trainer.architectures.base import DraftContext, Drafter
from trainer.errors import Several, UserError
from trainer.ranges import Gives
from trainer.records import Sample
from trainer.target import Target
from trainer.target_head import head_names, load_target_head, read_tensors, tensor_names, tensor_shapes
from trainer.training.checkpoint import load_weights

AGAIN = "export the drafter of drafter.start_from again, or set drafter.start_from=null"
FEW, RARE = 10, 1e-3  # a mask token may be said so often, or be such a share: sampling says anything once
MakeDrafter = Annotated[partial, Gives(("context",))]  # the drafter's YAML node, waiting for its context


def build_drafter(make: MakeDrafter, target: Target, token_counts: Tensor) -> Drafter:
    """A fresh drafter; the same arguments give the same bits."""
    require_buildable(make, target, None)
    head = load_target_head(target.folder, target.config)
    context = DraftContext(target.config, head, target.mask_token_id, token_counts, special_ids(target),
                           {index: _layer(target, index) for index in wanted_layers(make, target)},
                           read_tensors(target.folder, own_names(make, target)))
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
    head_names(target.folder, target.config)
    if target.nested and (problem := make.func.nested_problem(**make.keywords)):
        raise UserError(f"{target.name} ({target.folder}) cannot be trained with this drafter: {problem}")
    if found:
        raise Several([f"drafter.{name}={make.keywords[name]} {text}" for name, text in found.items()])
    if make.func.own_prefixes(target.config, **make.keywords):
        shapes = tensor_shapes(target.folder, own_names(make, target))
        if problem := make.func.own_problem(target.config, shapes):
            raise UserError(f"{target.name} ({target.folder}) cannot be trained with this drafter: {problem}")


def special_ids(target: Target) -> tuple[int, ...]:
    """Tokens that begin and end texts, and those that the chat template writes, as the marks of thinking and
    of calls; every draft vocabulary has them, since an answer may have them that was never seen."""
    return tuple(dict.fromkeys((*_ends(target), *_marks(target))))


def mark_facts(make: MakeDrafter, target: Target) -> dict[str, Any]:
    """The marks that decide about a reduced draft vocabulary, where the template writes any."""
    reduced = make.keywords.get("draft_vocab_size") is not None
    more = [token for token in _marks(target) if token not in _ends(target)] if reduced else []
    return {"marks": more} if more else {}


def _ends(target: Target) -> list[int]:
    bos = target.tokenizer.bos_token_id
    return [*target.end_ids, *([] if bos is None else [bos])]


def _marks(target: Target) -> list[int]:
    """The tokens of their own that stand in the chat template, ascending."""
    template = str(target.tokenizer.chat_template or "")
    return sorted(number for number, token in target.tokenizer.added_tokens_decoder.items()
                  if token.content in template)


def first_drafter(make: MakeDrafter, target: Target, counts: Tensor,
                  by_category: Mapping[str, Tensor] | None = None) -> tuple[Drafter, dict[str, Any]]:
    """The drafter that training begins with, and what of it belongs in the record; says how its vocabulary
    covers the supervised tokens, in all and by category."""
    drafter, folder = build_drafter(make, target, counts), initial_folder(make)
    if folder is not None:
        require_start(make, target)
        _begin(drafter, folder)
        print(f"train: begins with the drafter in {folder}", flush=True)
    covered = drafter.coverage(counts)
    if covered is None:
        return drafter, {}
    parts = {name: drafter.coverage(part) for name, part in (by_category or {}).items() if part.any()}
    covered = replace(covered, by_category={name: part.covered for name, part in parts.items() if part})
    for sentence in covered.sentences():
        print(sentence, flush=True)
    return drafter, {"draft_vocabulary": asdict(covered)}


def initial_folder(make: MakeDrafter) -> Path | None:
    """The folder of the exported drafter that training begins with."""
    found = make.func.initial_folder(**make.keywords)
    return None if found is None else Path(found).expanduser()


def start_facts(make: MakeDrafter) -> dict[str, Any]:
    """For the fingerprint: checksums of the drafter that training begins with; nothing without one."""
    folder = _found_folder(make)
    if folder is None:
        return {}
    sums = _folders.sums(folder)
    return {"start_from": {name: each["xxh3_64"] for name, each in sums.items()
                           if name in ("config.json", INDEX) or name.endswith(".safetensors")}}


def _found_folder(make: MakeDrafter) -> Path | None:
    """The folder of `initial_folder`, which has a drafter's files."""
    folder = initial_folder(make)
    if folder and (found := pickles(folder)):
        raise UserError(f"drafter.start_from={folder} has {found}, which may run code when they are opened; "
                        f"{CONVERT}, and remove them there")
    if folder and not ((folder / "config.json").is_file() and list(folder.glob("*.safetensors"))):
        raise UserError(f"drafter.start_from={folder} is no folder of an exported drafter: it has no "
                        "config.json, or no *.safetensors; give the folder speculators/ or native/ of a "
                        "finished stage export, or null")
    return folder


def require_start(make: MakeDrafter, target: Target) -> None:
    """Raises unless the drafter can begin with that in its `start_from`, where that is set: its config fits,
    and one without values (on the device meta) takes all of its tensors."""
    folder = _found_folder(make)
    if folder is None:
        return
    given = _folders.read_object(folder / "config.json", AGAIN)
    problem = make.func.start_problem(given, target.config, target.mask_token_id, **make.keywords)
    if problem is not None:
        raise UserError(f"drafter.start_from={folder} cannot be begun with: {problem}")
    _begin(without_values(make, target), folder)


def without_values(make: MakeDrafter, target: Target) -> Drafter:
    """The drafter with its tensors on the device meta, as nothing was read of the target but its config."""
    head = load_target_head(target.folder, target.config, values=False)
    chosen = {"draft_vocab_size": None, "start_layers": ()}  # by values
    settings = make.keywords | {name: value for name, value in chosen.items() if name in make.keywords}
    with torch.device("meta"):
        counts = torch.zeros(head.vocab_size, dtype=torch.int64)
        context = DraftContext(target.config, head, target.mask_token_id, counts, special_ids(target), {})
        return make.func(context=context, **settings)


def _begin(drafter: Drafter, folder: Path) -> None:
    weights = exported_weights(folder, AGAIN)
    try:
        drafter.begin_with(weights)
    except ValueError as error:
        raise UserError(f"drafter.start_from={folder} cannot be begun with: {error}") from error


def exported_weights(folder: Path, remedy: str) -> dict[str, Tensor]:
    """The tensors of an exported drafter: of the files that its index names or, without one, of all; none may
    be there twice, since who reads them last would win, and none that the index names may be missing. Errors
    end with the `remedy`."""
    weights: dict[str, Tensor] = {}
    files, promised = [path.name for path in sorted(folder.glob("*.safetensors"))], set()
    if (folder / INDEX).is_file():
        places = indexed(folder / INDEX, remedy)
        files, promised = sorted({*places.values()}), {*places}
    for name in files:
        try:
            found = load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); {remedy}") from error
        if twice := sorted(weights.keys() & found.keys()):
            raise UserError(f"{folder / name} has {len(twice)} tensors that another file there has, too "
                            f"({', '.join(twice[:3])}); remove the one that is not meant")
        weights |= found
    if absent := sorted(promised - weights.keys()):
        raise UserError(f"{folder} lacks {len(absent)} tensors that its {INDEX} names "
                        f"({', '.join(absent[:3])}); {remedy}")
    return weights


def wanted_layers(make: MakeDrafter, target: Target) -> tuple[int, ...]:
    """Layers of the target that the drafter starts from; raises when it has no such layers."""
    wanted, count = make.func.initial_layers(**make.keywords), target.config["num_hidden_layers"]
    for index in wanted:
        if not -count <= index < count:
            raise UserError(f"drafter.start_layers names layer {index}, but {target.name} has {count} layers")
    return wanted


def own_names(make: MakeDrafter, target: Target) -> list[str]:
    """The target's tensors of the drafter that it brings along, where this one begins with it."""
    prefixes = make.func.own_prefixes(target.config, **make.keywords)
    return [name for name in tensor_names(target.folder) if name.startswith(prefixes)] if prefixes else []


def draft_problem(make: MakeDrafter, k: int, config: dict[str, Any] | None = None) -> str | None:
    """Why the drafter cannot draft `k` tokens or, with the (text) config of its target, no server has it do
    so; for people, None when nothing is wrong."""
    shortest, longest = (ask(**make.keywords) for ask in (make.func.shortest_draft, make.func.longest_draft))
    if shortest <= k <= longest:
        return None if config is None else make.func.served_problem(config, k, **make.keywords)
    setting = f"drafter.{make.func.length_setting}={make.keywords[make.func.length_setting]}"
    if shortest > 1:
        return f"must be {longest}, as a server drafts whole blocks alone ({setting}), but is {k}"
    if longest == 1:
        return f"must be 1, the only draft with {setting}, but is {k}"
    return f"must lie between 1 and {longest}, the longest draft with {setting}, but is {k}"


def require_drafts(make: MakeDrafter, target: Target, lengths: Mapping[str, int]) -> None:
    """Raises for all of these draft lengths, by setting, with which the drafter cannot be served."""
    found = {key: draft_problem(make, k, target.config) for key, k in lengths.items()}
    if problems := [f"{key}={lengths[key]} {text}" for key, text in found.items() if text is not None]:
        raise Several(problems)


def load_trained(make: MakeDrafter, target: Target, folder: Path) -> Drafter:
    """The drafter that the finished train stage in `folder` left, in float32, for use (not training)."""
    counts = load_file(folder / "token_counts.safetensors")["token_counts"]
    drafter = build_drafter(make, target, counts)
    load_weights(drafter, load_file(folder / "weights.safetensors"), folder)
    return drafter.eval().requires_grad_(False)


def require_unused_mask(target: Target, samples: Sequence[Sample]) -> None:
    """Raises when the target says its mask token: slots that stand for "not known" would mean that token."""
    mask = target.mask_token_id
    said = sum(flag and token == mask for sample in samples
               for token, flag in zip(sample.tokens, sample.loss_mask, strict=True))
    total = sum(sample.supervised for sample in samples)
    if said > max(FEW, RARE * total):
        raise UserError(f"target.mask_token {target.mask_token!r} (id {mask}) is a token that {target.name} "
                        f"says: {said} of the {total} supervised tokens; choose an unused one, for example "
                        f"one of {target.unused_tokens()}")


def save_counts(folder: Path, counts: Tensor) -> None:
    save_file({"token_counts": counts}, folder / "token_counts.safetensors")


def count_tokens(samples: Sequence[Sample], vocab_size: int) -> Tensor:
    """How often each token is supervised, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[torch.tensor(sample.loss_mask)]
        counts += torch.bincount(tokens, minlength=vocab_size)
    return counts


def count_by_category(samples: Sequence[Sample], vocab_size: int) -> dict[str, Tensor]:
    """How often each token is supervised in each category, [V] int64."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.category, []).append(sample)
    return {name: count_tokens(group, vocab_size) for name, group in sorted(groups.items())}


def _layer(target: Target, index: int) -> dict[str, Tensor]:
    """Tensors of the target's 0-based decoder layer `index`, names relative to the layer."""
    part = f"layers.{index % target.config['num_hidden_layers']}."
    names = {name.split(part, 1)[1]: name for name in tensor_names(target.folder)
             if f".{part}" in name and "vision" not in name and "mtp" not in name}
    tensors = read_tensors(target.folder, names.values())
    return {short: tensors[name] for short, name in names.items()}
