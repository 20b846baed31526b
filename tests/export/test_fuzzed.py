"""Damaged config files: each is one clear sentence, or the drafter that it says, and never a guess unsaid.

A changed key either stops the reading or is what comes out; a key that is gone either stops it or leaves the
same drafter, told by another key or named among what is guessed.
"""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from drafters import HELD, written
from safetensors.torch import load_file
from torch import Tensor

from trainer.errors import UserError
from trainer.export.described import Described, describe
from trainer.export.formats import LAYOUTS
from trainer.export.promised import renamed, require_tensors
from trainer.export.reading import INERT
from trainer.target import Target

CASES, SEED = 500, 20
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 1e308, -1e308, math.inf, -math.inf, math.nan, 1 << 31,
    1 << 63, 10 ** 30, -(10 ** 30), "", "64", "../../etc/passwd", "/etc/passwd", "a\0b", "~", "${HOME}", "\n",
    "x" * 10_000, [], [None], [[]], [1, 2], [2, 1], [1, 1], [-1], [1 << 40], ["full_attention"],
    ["../config.json"], list(range(5000)), {}, {"a": {}}, {"rope_type": "yarn"}, {"rope_theta": "x"},
    {"rope_type": "../x", "rope_theta": 1e4}, {"factor": 0}, {"rope_type": "linear", "factor": math.inf}]
Path_ = tuple[str | int, ...]


@pytest.fixture(scope="module")
def folders(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, dict]]:
    """Config and tensors of each format of each drafter."""
    root, found = tmp_path_factory.mktemp("folders"), []
    for name, form in HELD:
        folder = written(tiny_target, name, form, root / f"{name}-{form}")
        found.append((json.loads((folder / "config.json").read_text()),
                      load_file(folder / "model.safetensors")))
    return found


def places(value: Any, start: Path_ = ()) -> list[Path_]:
    """Where something can be changed, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    deeper = [place for key, each in inner for place in places(each, (*start, key))]
    return [start, *deeper] if start else deeper


def damaged(config: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str, Path_, Any]:
    """A copy that is wrong in one place: the kind of damage, the place and the new value."""
    changed, place = copy.deepcopy(config), draw.choice(places(config))
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    kind = draw.choice(["gone", "other", "other", "other", "extra", "renamed"])
    value = draw.choice(VALUES)
    kind = "other" if isinstance(holder, list) else kind
    if kind == "gone":
        del holder[place[-1]]
    elif kind == "other":
        holder[place[-1]] = value
    elif kind == "extra":
        holder[draw.choice(["x", "../x", "norm_output_", "hidden_sizes", "", "__class__", "a" * 300])] = value
    else:
        holder[f"{place[-1]}s"] = holder.pop(place[-1])
    return changed, kind, place, value


def content(found: Described) -> str:
    return json.dumps([found.method, found.geometry, found.options, found.target_layers,
                       None if found.verifier is None else vars(found.verifier)], sort_keys=True)


def loaded(config: dict[str, Any], tensors: dict[str, Tensor]) -> Described:
    found = describe(json.loads(json.dumps(config)), "config.json")
    require_tensors(found, renamed(found, tensors, "folder"), "folder")
    return found


def test_damaged_configs_are_a_sentence_or_what_they_say(folders: list[tuple[Any, dict]]) -> None:
    draw, refused = random.Random(SEED), 0
    for case in range(CASES):
        config, tensors = draw.choice(folders)
        before = loaded(config, tensors)
        assert before.guessed == ()
        changed, kind, place, value = damaged(config, draw)
        told = f"case {case}: {kind} {place} {value!r:.60}"
        try:
            found = loaded(changed, tensors)
        except UserError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1 and 20 < len(str(error)) < 1000, told
            continue
        idle = place[-1] in INERT
        same = content(found) == content(before)
        if kind in ("gone", "renamed"):
            assert same or found.guessed, f"{told} changed the drafter without a word"
            assert kind == "gone" or idle, f"{told}: an unknown key was dropped"
        elif kind == "extra":
            pytest.fail(f"{told}: an unknown key was dropped")
        else:
            assert same or found.guessed or json.dumps(value) in content(found) \
                or (isinstance(value, int | float) and json.dumps(float(value)) in content(found)), told
    assert CASES / 2 < refused < CASES, "most damage is seen, and some means nothing"


@pytest.mark.parametrize("form", LAYOUTS)
def test_own_folders_are_read_back_without_any_guess(form: str, tiny_target: Target, tmp_path: Path) -> None:
    """What the engines would guess is an error there, as is what the format has otherwise."""
    name = next(name for name, each in HELD if each == form)
    folder = written(tiny_target, name, form, tmp_path)
    config, draw, refused = json.loads((folder / "config.json").read_text()), random.Random(SEED), 0
    before = content(LAYOUTS[form].whole(folder)[0])
    for case in range(40):
        changed, kind, place, value = damaged(config, draw)
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            found = LAYOUTS[form].whole(folder)[0]
        except UserError:
            refused += 1
            continue
        assert kind == "other", f"case {case}: {kind} {place} {value!r:.60}"
        carried = (json.dumps(value), json.dumps(float(value)) if isinstance(value, int | float) else None)
        assert place[-1] in INERT or content(found) == before \
            or any(each and each in content(found) for each in carried), f"case {case}: {place} {value!r:.60}"
    assert refused > 20
