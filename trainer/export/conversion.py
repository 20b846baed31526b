"""From a drafter's folder of any known layout to one of another format, for `tools/convert.py`.

Nothing is lost on the way: a key or a tensor is read, known to mean nothing (and named), or an error. Tensors
keep their bits, so a folder that comes back to its first format is as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer import _folders
from trainer._weight_files import CONVERT, pickles
from trainer.architectures.geometry import lengthened
from trainer.errors import UserError
from trainer.export.base import Serving
from trainer.export.beside import beside
from trainer.export.described import Described, describe
from trainer.export.formats import LAYOUTS
from trainer.export.promised import renamed, require_tensors
from trainer.export.reading import MENDED, read_config
from trainer.target import text_part
from trainer.training.build import exported_weights

CARRIED = ("speculator.json", "provenance.json")  # facts of the drafter, whatever the format


@dataclass(frozen=True)
class Given:
    """What the folder does not say: the target's name, its folder, how many layers it has, the draft length,
    and keys of config.json (`a.b` for a nested one) in place of its own or beside them."""

    target: str | None = None
    target_folder: Path | None = None
    target_layers: int | None = None
    k: int | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    max_context: int | None = None


def convert(source: Path, place: Path, form: str, given: Given) -> list[str]:
    """Writes the folder `place`; what to tell of it, line by line. UserError for anything to mend."""
    partial = _free(place, source)
    if found := pickles(source):
        raise UserError(f"{source} has {found}, which may run code when they are opened; {CONVERT}, and "
                        "remove them there")
    found, target = _described(source, given)
    weights = renamed(found, exported_weights(source, MENDED), str(source))
    require_tensors(found, weights, str(source))
    serving = _serving(source, found, given)
    try:
        LAYOUTS[form].put(partial, found, weights, serving)
        LAYOUTS[form].whole(partial)
        for name in CARRIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        _folders.settle(partial)
        partial.rename(place)
    except OSError as error:
        raise UserError(f"{place} cannot be made ({error}); give it another place, or free some "
                        "space") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    vllm = "dflash" if found.method == "dflash2" else found.method
    lengths = {"num_speculative_tokens": serving.default_k}
    commands = LAYOUTS[form].commands(vllm, place, serving.target, lengths)
    return [f"{found.method}, {len(weights)} tensors, as {form}: {LAYOUTS[form].use}", beside(target, found),
            *(f"note: {each}" for each in (*found.guessed, *found.idle)),
            *(f"{name}: {line}" for name, line in commands.items())]


def _described(source: Path, given: Given) -> tuple[Described, dict[str, Any]]:
    """What the folder is, and the target's config where its folder is given."""
    config = read_config(source)
    for name, value in given.keys.items():
        *path, last = name.split(".")
        inner = config
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UserError(f"--set {name}: {part} is no object in {source / 'config.json'}")
        inner[last] = value
    found = describe(config, str(source / "config.json"))
    if given.max_context is not None:
        try:
            found = replace(found, geometry=lengthened(found.geometry, given.max_context))
        except ValueError as error:
            raise UserError(str(error).replace("export.max_context", "--max-context")) from error
    target = {} if given.target_folder is None else text_part(read_config(given.target_folder))
    layers = target.get("num_hidden_layers", given.target_layers)
    layers = found.target_layers if layers is None else layers
    if layers is not None and found.options["tap_layers"][-1] > layers:
        raise UserError(f"{source}: it reads the target after layer {found.options['tap_layers'][-1]}, and "
                        f"the target has {layers} layers; give the target of this drafter")
    for name, held in (("vocab_size", "vocab_size"), ("hidden_size", "target_hidden_size")):
        own = {**found.geometry, **found.options}[held]
        if target and target.get(name) != own:
            raise UserError(f"{source}: its {held} is {own}, and {name} in {given.target_folder} is "
                            f"{target.get(name)}; give the target of this drafter")
    return replace(found, target_layers=layers), target


def _serving(source: Path, found: Described, given: Given) -> Serving:
    """Target and draft length: as given, else as the folder says them, else the longest draft."""
    facts = _folders.read_object(source / CARRIED[0], MENDED) if (source / CARRIED[0]).is_file() else {}
    told = found.verifier
    name = given.target or (told.name if told else facts.get("target")) \
        or (str(given.target_folder) if given.target_folder else None)
    k = given.k or (told.k if told else facts.get("default_k")) or found.longest
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"{source} does not say which target it is for; give --target NAME_OR_FOLDER")
    if type(k) is not int or k < 1:
        raise UserError(f"{source} does not say how many tokens it drafts; give --k")
    if found.longest is not None and k > found.longest:
        raise UserError(f"{source} drafts {found.longest} tokens at most (its block has "
                        f"{found.options['block_size']} slots), but the length is {k}; give a smaller --k")
    names = told.architectures if told else []
    if given.target_folder is not None:
        names = read_config(given.target_folder).get("architectures") or names
    return Serving(name, names, k, given.target_folder, found.target_layers)


def _free(place: Path, source: Path) -> Path:
    """Where the new folder is made before it is in its place; raises where there can be none."""
    partial = Path(f"{place}.partial")
    for each in (place, partial):
        if os.path.lexists(each):
            raise UserError(f"{each} is there already; give another name for the new folder, or remove what "
                            "a call that was killed has left")
    if place.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{place} lies inside {source}, which is only read; give the new folder another "
                        "place")
    return partial


def parsed(text: str) -> tuple[str, Any]:
    """KEY=VALUE of `--set`, the value as JSON."""
    name, sign, value = text.partition("=")
    try:
        if not sign or not name:
            raise ValueError("it has no key, or no =")
        return name, json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--set {text[:80]} cannot be read ({error}); write --set KEY=VALUE with a value as "
                        "in JSON, such as rope_theta=500000") from error
