"""Strict reading of a draft's config.json: every key is known, of its kind, and read or said to mean nothing.

What an engine would guess in place of a missing key is only taken where all engines guess alike, and is then
said in a note; the rest (rotary positions, head size, layer ids, mask token) has to be written.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer._fits import mismatch
from trainer.architectures.layers import Rotary
from trainer.errors import UNREADABLE, UserError
from trainer.ranges import AtLeast, AtMost, Filled, NotNegative, Positive, Text

REQUIRED: Any = object()
Size = Annotated[int, AtLeast(1), AtMost(1 << 31)]  # more rows than this no tensor here has
Depth = Annotated[int, AtLeast(1), AtMost(1 << 10)]
Width = Annotated[int, AtLeast(2), AtMost(1 << 14)]  # of a head
Id = Annotated[int, AtLeast(0), AtMost(1 << 31)]
Ids = Annotated[list[Annotated[int, AtLeast(-1), AtMost(1 << 10)]], Filled()]  # -1: of the embeddings
# What published configs copy from their target, or a training tool notes; no engine reads it of a draft.
INERT = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version",
         "use_cache", "max_window_layers", "num_anchors", "auto_map", "pretraining_tp", "_name_or_path",
         "_attn_implementation", "ttt_length", "step_loss_decay", "draft_num_hidden_layers",
         "target_model_name_or_path", "speculators_version", "embed_requires_grad")
ROPE = {"rope_type": Text, "rope_theta": Positive, "factor": Annotated[float, AtLeast(1)],
        "original_max_position_embeddings": Size, "attention_factor": Positive | None,
        "beta_fast": Positive | None, "beta_slow": Positive | None, "low_freq_factor": Positive,
        "high_freq_factor": Positive, "short_factor": list[float], "long_factor": list[float],
        "mscale": NotNegative | None, "mscale_all_dim": NotNegative | None, "truncate": bool | None}
MENDED = "mend it there, or fetch the folder again"


@dataclass
class Notes:
    """Sentences on keys that were not written, and on those that were left out as they mean nothing."""

    guessed: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


class Keys:
    """The keys of a JSON object, taken one by one; `done` raises for those that nobody took. `place` is the
    file (and the part of it) for messages."""

    def __init__(self, found: Mapping[str, Any], place: str, notes: Notes) -> None:
        self.left, self.place, self.notes = dict(found), place, notes
        self.known: list[str] = []

    def take(self, name: str, hint: Any, missing: Any = REQUIRED) -> Any:
        self.known.append(name)
        if name not in self.left:
            if missing is REQUIRED:
                raise self.wrong(f"{name} is missing, and engines would guess it; write it into the file")
            self.notes.guessed.append(f"{self.place}: {name} is not written, which means "
                                      f"{json.dumps(missing)}")
            return missing
        value = self.left.pop(name)
        if problem := mismatch(value, hint, recursive=False):
            raise self.wrong(f"{name} {problem[:200]}; {MENDED}")
        return value

    def may(self, name: str, hint: Any) -> Any:
        """The value of a key that has its place elsewhere, too; None without it."""
        self.known.append(name)
        return self.take(name, hint) if name in self.left else None

    def only(self, name: str, supported: Any, missing: Any = REQUIRED) -> None:
        """A feature that drafters here have one way alone; `missing`: what engines take without the key."""
        value = self.take(name, Any, missing)
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            raise self.wrong(f"{name} is {json.dumps(value)[:60]}, a feature that is not supported here, "
                             f"where it is always {json.dumps(supported)}; take another drafter")

    def inner(self, name: str, missing: Any = REQUIRED) -> Keys:
        found = self.take(name, dict, missing)
        return Keys(found, f"{self.place}: {name}", self.notes)

    def done(self, inert: tuple[str, ...] = INERT) -> None:
        idle = [name for name in self.left if name in inert]
        if unknown := [name for name in self.left if name not in inert]:
            name = unknown[0]
            near = difflib.get_close_matches(name, self.known, 1, 0.6)
            hint = f"; nearest: {near[0]}" if near else ""
            raise self.wrong(f"{name[:60]!r} is not a key that is known here{hint}; what it means for the "
                             "drafter would be lost, so take it out only if it means nothing")
        if idle:
            self.notes.idle.append(f"{self.place}: {', '.join(idle)}: left out, as no engine reads that of a "
                                   "draft")

    def wrong(self, text: str) -> UserError:
        return UserError(f"{self.place}: {text}")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; a key that is written twice is an error, since engines would take either."""
    path = folder / "config.json"

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]!r} is written twice")
        return dict(pairs)

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); {MENDED}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a JSON object, but holds a {type(found).__name__}; {MENDED}")
    return found


def read_geometry(keys: Keys, kinds: tuple[str, ...], tied: bool) -> dict[str, Any]:
    """The decoder as `architectures.geometry` writes it, of a draft in the layout of one of the `kinds`;
    `tied` embeddings are let through where the draft has none of its own."""
    kind = keys.take("model_type", Literal[kinds])
    hidden, layers = keys.take("hidden_size", Size), keys.take("num_hidden_layers", Depth)
    heads, groups = keys.take("num_attention_heads", Size), keys.take("num_key_value_heads", Size)
    even = hidden // heads if kind == "llama" and hidden % heads == 0 else REQUIRED
    shape = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": groups,
             "head_dim": keys.take("head_dim", Width, even),
             "intermediate_size": keys.take("intermediate_size", Size), "hidden_act": "silu",
             "rms_norm_eps": keys.take("rms_norm_eps", Positive), "attention_bias": False,
             "attention_dropout": keys.take("attention_dropout", NotNegative, 0.0)}
    if heads % groups:
        raise keys.wrong(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}; "
                         f"{MENDED}")
    keys.only("hidden_act", "silu", "silu")
    keys.only("attention_bias", False, False)
    if keys.may("mlp_bias", bool):
        raise keys.wrong("mlp_bias is true, a feature that is not supported here; take another drafter")
    positions = keys.take("max_position_embeddings", Size)
    shape["rope_parameters"] = read_rope(keys, shape["head_dim"], positions)
    shape |= {"max_position_embeddings": positions, "vocab_size": keys.take("vocab_size", Size)}
    window = keys.take("sliding_window", Size | None, None)
    used = keys.take("use_sliding_window", bool, False)
    kept = keys.take("layer_types", list[str], REQUIRED if used else ["full_attention"] * layers)
    if kept != ["full_attention"] * layers:
        raise keys.wrong(f"layer_types is {json.dumps(kept)[:80]} (sliding_window {window}), expected "
                         f"full_attention for each of the {layers} layers: other kinds are not supported "
                         "here; take another drafter")
    shape |= {"layer_types": kept, "sliding_window": None, "use_sliding_window": False,
              "tie_word_embeddings": False}
    if tied:
        keys.take("tie_word_embeddings", bool, False)
    else:
        keys.only("tie_word_embeddings", False, False)
    return {**shape, "initializer_range": keys.take("initializer_range", NotNegative, 0.02)}


def read_rope(keys: Keys, head_dim: int, positions: int) -> dict[str, Any]:
    """`rope_parameters`, from that key or the older two (`rope_theta`, `rope_scaling`), or both where they
    agree; their base always has to be written."""
    newer, older = (_rope(keys, name) for name in ("rope_parameters", "rope_scaling"))
    theta = keys.may("rope_theta", Positive | None)
    if newer and older and any(newer.get(key, value) != value for key, value in older.items()):
        raise keys.wrong(f"rope_parameters and rope_scaling differ; {MENDED}")
    rope = {"rope_type": "default", **(newer or older or {})}
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise keys.wrong(f"rope_theta is {theta} and {rope['rope_theta']} in rope_parameters; {MENDED}")
    if "rope_theta" not in rope:
        raise keys.wrong("rope_theta is missing, and engines would guess it (10,000 or 1,000,000); write "
                         "that of the target into the file")
    rope["rope_theta"] = float(rope["rope_theta"])
    try:
        Rotary(head_dim, rope, positions)
    except UNREADABLE as error:
        text = str(error).replace("the target's ", "") or type(error).__name__
        raise keys.wrong(f"{text.partition(';')[0][:300]}; {MENDED}") from error
    return rope


def _rope(keys: Keys, name: str) -> dict[str, Any]:
    """One of the two dicts, each value of its kind; empty without it."""
    found = dict(keys.may(name, dict | None) or {})
    older = found.pop("type", None)
    if older is not None and found.setdefault("rope_type", older) != older:
        raise keys.wrong(f"{name} names two kinds, type {str(older)[:60]} and rope_type; {MENDED}")
    unknown = [] if found.pop("partial_rotary_factor", 1.0) == 1.0 else ["partial_rotary_factor"]
    for key in [*unknown, *(key for key in found if key not in ROPE)]:
        raise keys.wrong(f"{name} has {key[:60]!r}, which is not supported here (drafts turn whole heads, by "
                         "positions of text); take another drafter")
    for key, value in found.items():
        if problem := mismatch(value, ROPE[key], recursive=False):
            raise keys.wrong(f"{name}.{key} {problem}; {MENDED}")
        if isinstance(value, list) and not all(0 < each < math.inf for each in value):
            raise keys.wrong(f"{name}.{key} must hold numbers above 0; {MENDED}")
    return found
