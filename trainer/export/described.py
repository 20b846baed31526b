"""What a drafter's config.json says, in one form for all formats: they are read into it, and written from it.

Layer ids in it are those of `records`, the stream after so many layers. Published layouts count the outputs
of 0-based layers (`target_layer_ids`, and SGLang's `eagle_config`), one less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.export.reading import MENDED, REQUIRED, Id, Ids, Keys, Notes, Size, read_geometry
from trainer.ranges import Count, SequenceLength, Text

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
BLOCK = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "Qwen3DSparkModel": "dspark",
         "DSparkDraftModel": "dspark"}
CHAIN = {"LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama",
         "Eagle3Qwen3ForCausalLM": "qwen3", "Qwen3Eagle3Model": "qwen3"}
NAMES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel",
         "llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
Architectures = list[Text]


@dataclass(frozen=True)
class Verifier:
    """The target that a drafter is served with, and the length of its drafts."""

    name: str
    architectures: list[str]
    k: int


@dataclass(frozen=True)
class Described:
    """`method` is dflash, dflash2, dspark or eagle3; `geometry` as `architectures.geometry` makes it;
    `options` are the method's own: `tap_layers`, `draft_vocab_size` and `target_hidden_size` always, for
    blocks `block_size` and `mask_token_id`, and what else the method has. `target_layers` counts those of the
    target, where it is known; `guessed` tells what was not written, `idle` what was left out."""

    method: str
    geometry: dict[str, Any]
    options: dict[str, Any]
    target_layers: int | None = None
    verifier: Verifier | None = None
    guessed: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def reduced(self) -> bool:
        return self.options["draft_vocab_size"] < self.geometry["vocab_size"]

    @property
    def longest(self) -> int | None:
        """The longest draft; EAGLE-3 does not say it."""
        return None if self.method == "eagle3" else \
            self.options["block_size"] - (0 if self.options.get("sample_from_anchor") else 1)

    @property
    def settings(self) -> dict[str, Any]:
        """As the settings of its drafter would be, for `Format.problem`."""
        small = self.options["draft_vocab_size"] if self.reduced else None
        return {**self.options, "draft_vocab_size": small, "layers": self.geometry["num_hidden_layers"],
                "style": self.geometry["model_type"]}


def describe(config: Mapping[str, Any], place: str) -> Described:
    """The drafter of a config.json of any format; raises UserError for what is missing, unknown, of another
    kind, or a feature that drafters here lack. `place` names the file."""
    keys = Keys(config, place, Notes())
    found = _any(keys, config)
    return replace(found, guessed=tuple(keys.notes.guessed), idle=tuple(keys.notes.idle))


def _any(keys: Keys, config: Mapping[str, Any]) -> Described:
    if config.get("speculators_config") is not None and "model_type" not in config:
        return _speculators(keys)
    name = keys.take("architectures", Architectures)
    if len(name) != 1 or name[0] not in {**BLOCK, **CHAIN}:
        raise keys.wrong(f"architectures is {json.dumps(name)[:80]}, expected one of "
                         f"{', '.join({**BLOCK, **CHAIN})}; give the folder of such a drafter")
    return _chain(keys, CHAIN[name[0]]) if name[0] in CHAIN else _block(keys, BLOCK[name[0]])


def _block(keys: Keys, method: str) -> Described:
    """Layouts of the authors: z-lab's nests its keys in `dflash_config`, DeepSpec's has them at the top, and
    SpecForge's DSpark has some here and some there."""
    inner = keys.inner("dflash_config", {}) if method != "dspark" else Keys({}, keys.place, keys.notes)
    if method == "dspark" and "dflash_config" in keys.left:
        nested = keys.take("dflash_config", dict)
        if twice := [name for name in nested if keys.left.get(name, nested[name]) != nested[name]]:
            raise keys.wrong(f"{twice[0][:60]} differs from that in dflash_config; {MENDED}")
        keys.left |= nested
    shape = read_geometry(keys, ("qwen3",), tied=method != "dspark")
    options = {"tap_layers": _taps(keys, inner),
               **_common(keys, shape), "block_size": _either(keys, inner, "block_size", SequenceLength),
               "mask_token_id": _either(keys, inner, "mask_token_id", Id)}
    _require_row(keys, options["mask_token_id"], shape["vocab_size"])
    causal = [each for each in (keys.may("is_causal", bool), inner.may("causal", bool)) if each is not None]
    if any(causal):
        raise keys.wrong("its layers are causal, a feature that is not supported here; take another drafter")
    if not causal and method != "dspark":  # whose layer_types alone decide it
        keys.notes.guessed.append(f"{keys.place}: causal is not written, which means false for full "
                                  "attention")
    for name, plain in (("use_swa", False), ("attention_sink_bias", False), ("use_aux_hidden_state", True),
                        ("attention_value_scale", None), ("input_embedding_scale", 1.0),
                        ("output_multiplier", 1.0), ("final_logit_softcapping", None)):
        if name in inner.left:
            inner.only(name, plain)
    for name, plain in (("logit_scale", 1.0), ("is_neox_style", True), ("has_own_lm_head", False)):
        if name in keys.left:
            keys.only(name, plain)
    if method == "dflash2":
        options |= {name: inner.take(name, Count) for name in SELECTOR}
        if shape["hidden_size"] % options["conv_group_size"]:
            raise inner.wrong(f"conv_group_size {options['conv_group_size']} does not divide hidden_size "
                              f"{shape['hidden_size']}; {MENDED}")
    if method == "dspark":
        options |= _dspark(keys, {"sample_from_anchor": True})
    elif "sample_from_anchor" in inner.left:
        inner.only("sample_from_anchor", False)
    layers = _layers(keys, inner)
    inner.done(("num_anchors",))
    keys.done()
    return Described(method, shape, options, layers)


def _chain(keys: Keys, style: str) -> Described:
    """EAGLE-3: HF's layout, SGLang's (ids in `eagle_config`, too), and DeepSpec's (`target_layer_ids`)."""
    shape = read_geometry(keys, (style,), tied=False)
    inner = keys.inner("eagle_config") if "eagle_config" in keys.left else Keys({}, keys.place, keys.notes)
    taps = _taps(keys, inner)
    options = {"tap_layers": taps, **_common(keys, shape), **_flags(keys, False)}
    if inner.may("norm_before_fc", bool) not in (None, options["norm_before_fc"]):
        raise inner.wrong(f"norm_before_fc is not as at the top; {MENDED}")
    if "use_aux_hidden_state" in inner.left:
        inner.only("use_aux_hidden_state", True)
    _count(keys, taps, len(taps) == 3 or style == "qwen3")
    for name, plain in (("logit_scale", 1.0), ("bias", False)):
        if name in keys.left:
            keys.only(name, plain)
    layers = _layers(keys, inner)
    inner.done(())
    keys.done()
    return Described("eagle3", shape | {"num_aux_hidden_states": len(taps)}, options, layers)


def _speculators(keys: Keys) -> Described:
    method = keys.take("speculators_model_type", Literal["dflash", "dflash2", "dspark", "eagle3"])
    inner, chain = keys.inner("transformer_layer_config"), method == "eagle3"
    shape = read_geometry(inner, ("llama", "qwen3") if chain else ("qwen3",), tied=method[:6] == "dflash")
    name = "eagle_aux_hidden_state_layer_ids" if chain else "aux_hidden_state_layer_ids"
    options = {"tap_layers": _ascending(keys, name, keys.take(name, Ids), 0), **_common(keys, shape)}
    if chain:
        options |= _flags(keys, True)
        count = len(options["tap_layers"])
        _count(inner, options["tap_layers"], count == 3 or shape["model_type"] == "qwen3")
        shape["num_aux_hidden_states"] = count
    else:
        options |= {"block_size": keys.take("block_size", SequenceLength),
                    "mask_token_id": keys.take("mask_token_id", Id)}
        _require_row(keys, options["mask_token_id"], shape["vocab_size"])
    if "use_aux_hidden_state" in keys.left:
        keys.only("use_aux_hidden_state", True)
    if method == "dspark":
        options |= _dspark(keys, {"sample_from_anchor": False})
        keys.may("sliding_window_non_causal", bool)  # which no engine reads of it
    elif not chain:
        keys.only("sample_from_anchor", False, False)
        keys.only("sliding_window_non_causal", True, True)
    if method == "dflash2":
        options |= {each: keys.take(each, Count) for each in SELECTOR}
    names = keys.take("architectures", Architectures, [])
    if "Qwen3OmniDSparkModel" in names:
        raise keys.wrong("Qwen3OmniDSparkModel is a drafter that is not supported here; take another one")
    keys.take("tie_word_embeddings", bool, False)
    layers = _layers(inner, Keys({}, keys.place, keys.notes))
    inner.done()
    verifier = _verifier(keys, method)
    keys.done()
    return Described(method, shape, options, layers, verifier)


def _verifier(keys: Keys, method: str) -> Verifier:
    own = keys.inner("speculators_config")
    if (algorithm := own.take("algorithm", Text, method)) != method:
        raise own.wrong(f"algorithm is {algorithm[:60]!r}, expected {method}; {MENDED}")
    own.take("default_proposal_method", Text, "greedy")
    proposals = own.take("proposal_methods", list[dict])
    if len(proposals) != 1:
        raise own.wrong(f"proposal_methods has {len(proposals)} entries, expected 1; {MENDED}")
    proposal = Keys(proposals[0], f"{own.place}: proposal_methods[0]", own.notes)
    k = proposal.take("speculative_tokens", Size)
    proposal.take("proposal_type", Text, "greedy")
    proposal.done(("accept_tolerance", "verifier_accept_k"))
    verifier = own.inner("verifier")
    found = Verifier(verifier.take("name_or_path", Text), verifier.take("architectures", list[str]), k)
    if not found.name.isprintable():
        raise verifier.wrong(f"name_or_path {found.name[:60]!r} is no name; {MENDED}")
    verifier.done(())
    own.done(())
    return found


def _require_row(keys: Keys, mask: int, rows: int) -> None:
    if mask >= rows:
        raise keys.wrong(f"mask_token_id {mask} is no row of the {rows} of vocab_size; {MENDED}")


def _common(keys: Keys, shape: Mapping[str, Any]) -> dict[str, Any]:
    rows, total = keys.take("draft_vocab_size", Size | None, None), shape["vocab_size"]
    width = keys.may("target_hidden_size", Size | None) or shape["hidden_size"]
    if (rows or 1) > total:
        raise keys.wrong(f"draft_vocab_size {rows} is more than vocab_size {total}; {MENDED}")
    return {"draft_vocab_size": rows or total, "target_hidden_size": width}


def _flags(keys: Keys, residual: bool) -> dict[str, bool]:
    """Of EAGLE-3; the first one without its key is `residual`, which depends on the format."""
    return {name: keys.take(name, bool, residual and name == FLAGS[0]) for name in FLAGS}


def _dspark(keys: Keys, missing: dict[str, bool]) -> dict[str, Any]:
    found = {name: keys.take(name, bool, value) for name, value in missing.items()}
    keys.only("markov_head_type", "vanilla", "vanilla")
    rank, sure = keys.take("markov_rank", Size), keys.take("enable_confidence_head", bool)
    both = keys.take("confidence_head_with_markov", bool, REQUIRED if sure else False)
    return {**found, "markov_rank": rank, "enable_confidence_head": sure,
            "confidence_head_with_markov": both}


def _taps(keys: Keys, inner: Keys) -> list[int]:
    """Wherever the ids are written; all places have to say the same."""
    top, nested = "eagle_aux_hidden_state_layer_ids", inner.may("eagle_aux_hidden_state_layer_ids", Ids)
    found = {name: _ascending(keys, name, ids, add) for name, ids, add in (
        (top, keys.may(top, Ids), 0), ("target_layer_ids", keys.may("target_layer_ids", Ids), 1),
        ("dflash_config: target_layer_ids", inner.may("target_layer_ids", Ids), 1)) if ids}
    if nested:  # vLLM's older runner reads these as they are, SGLang as outputs of layers
        if not found:
            raise keys.wrong(f"the layer ids stand in eagle_config alone, which SGLang reads as outputs of "
                             f"layers, and vLLM as numbers of layers; write {top} beside it (for SGLang's: "
                             f"{[each + 1 for each in nested]})")
        first = next(iter(found.values()))
        found["eagle_config"] = first if nested == first else _ascending(keys, "eagle_config", nested, 1)
    if not found:
        raise keys.wrong(f"{top} and target_layer_ids are missing, and engines would guess the layers; write "
                         "one of them into the file")
    if any(each != next(iter(found.values())) for each in found.values()):
        raise keys.wrong(f"the layers differ, told after how many layers each is taken: {found}; {MENDED}")
    return next(iter(found.values()))


def _ascending(keys: Keys, name: str, ids: list[int], add: int) -> list[int]:
    found = [each + add for each in ids]
    if found != sorted(set(found)) or found[0] < 0:
        raise keys.wrong(f"{name} {ids} must ascend, as engines order what fc reads so; {MENDED}")
    return found


def _count(keys: Keys, taps: list[int], told: bool) -> None:
    """What vLLM's Llama class takes for the width of fc, and three without it; the Qwen3 class counts the
    ids, so that it is `told` without the key."""
    count = keys.take("num_aux_hidden_states", Count, len(taps) if told else REQUIRED)
    if count != len(taps):
        raise keys.wrong(f"num_aux_hidden_states is {count}, but {len(taps)} layers are named; {MENDED}")


def _either(keys: Keys, inner: Keys, name: str, hint: Any) -> Any:
    top, nested = keys.may(name, hint), inner.may(name, hint)
    if top is None and nested is None:
        return keys.take(name, hint)
    if None not in (top, nested) and top != nested:
        raise keys.wrong(f"{name} is {top}, and {nested} in dflash_config; {MENDED}")
    return nested if top is None else top


def _layers(keys: Keys, inner: Keys) -> int | None:
    found = [keys.may("num_target_layers", Count), inner.may("num_target_layers", Count)]
    return next((each for each in found if each is not None), None)
