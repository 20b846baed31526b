"""Whether a target's files are whole and its config.json is that of the weights beside it, told from their
headers alone; and its whole model through transformers, none of whose weights is drawn at random. """

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer._fits import mismatch
from trainer._weight_files import CONVERT, INDEX, indexed, pickles
from trainer.errors import UserError
from trainer.ranges import Amount, Count, Positive, Text

KEYS: dict[str, Any] = {  # of the text part: what is read of it somewhere, where it is there
    "model_type": Text | None, "num_key_value_heads": Count | None, "head_dim": Count | None,
    "intermediate_size": Count | list | None,
    "max_position_embeddings": Count | None, "rms_norm_eps": Positive | None, "rope_theta": Positive | None,
    "rope_parameters": dict | None, "rope_scaling": dict | None, "logits_scaling": Positive,
    "final_logit_softcapping": Positive | None, "sliding_window": Amount | None,
    "tie_word_embeddings": bool | None, "quantization_config": dict | None}
ROPE: dict[str, Any] = {"rope_theta": Positive | None, "factor": Positive | None, "rope_type": Text | None,
                        "type": Text | None, "original_max_position_embeddings": Count | None}
POINTER = b"version https://git-lfs"
PLAIN = ("F32", "BF16", "F16", "F64")  # quantised tensors may be packed, and then have sizes of their own
MENDED = "mend it there, or fetch config.json and weights again"


class Header(NamedTuple):
    """What a shard says of a tensor: its file's name, the name of its dtype, its size."""

    file: str
    dtype: str
    shape: list[int]


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file of the target holds."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not as expected: it holds a {type(found).__name__}, not an object; fetch "
                        "it again")
    return found


def whole_weights(folder: Path) -> dict[str, Header]:
    """Every shard is there and whole, and holds the tensors that the index says; what it says of them."""
    from safetensors import SafetensorError, safe_open

    index, named = folder / INDEX, {path.name: set() for path in folder.glob("*.safetensors")}
    headers: dict[str, Header] = {}
    if index.is_file():
        places = indexed(index, "fetch it again")
        named = {name: {tensor for tensor, place in places.items() if place == name}
                 for name in sorted(set(places.values()))}
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise UserError(f"target folder {folder} lacks {len(missing)} of the {len(named)} shards that "
                            f"its index names ({', '.join(missing[:3])}); fetch them again")
    if not named:
        found = pickles(folder)
        raise UserError(f"target folder {folder} has no safetensors weights"
                        f"{f' but {found}, which may run code when they are opened' if found else ''}; "
                        f"{CONVERT}")
    for name, tensors in named.items():
        with (folder / name).open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UserError(f"{folder / name} is a Git LFS pointer, not the weights; run git lfs pull")
        try:
            with safe_open(folder / name, framework="pt") as file:
                held = {*file.keys()}
                absent = sorted(tensors - held)
                for tensor in tensors & held or held:
                    part = file.get_slice(tensor)
                    headers[tensor] = Header(name, part.get_dtype(), part.get_shape())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} is damaged or not whole ({error}); fetch it again") from error
        if absent:
            raise UserError(f"{folder / name} lacks {len(absent)} tensors that {INDEX} says it holds "
                            f"({', '.join(absent[:3])}); fetch both again")
    return headers


def require_readable(path: Path, config: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """Raises unless the values of a config.json (its text part: `text`) are of the kind that they should be,
    and transformers, where it knows such a model, takes them. Returns the text part with the defaults of
    transformers; None for a model that it does not know."""
    rope = [("", text, KEYS)]
    for name in ("rope_parameters", "rope_scaling"):
        found = text.get(name) if isinstance(text.get(name), dict) else {}
        rope += [(f"{name}.", found, ROPE)]
        rope += [(f"{name}.{kind}.", each, ROPE) for kind, each in found.items() if isinstance(each, dict)]
    for start, found, hints in rope:
        for name, hint in hints.items():
            if name in found and (problem := mismatch(found[name], hint)):
                raise UserError(f"{path}: {start}{name} {problem}; {MENDED}")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if (kind := str(config.get("model_type"))) not in CONFIG_MAPPING:
        return None  # a server may know it, or code that comes with it
    try:
        return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).get_text_config().to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is not the config of a {kind} that transformers takes "
                        f"({type(error).__name__}: {' '.join(str(error).split())}); {MENDED}") from error


def require_fit(path: Path, text: dict[str, Any], known: dict[str, Any] | None,
                headers: Mapping[str, Header]) -> None:
    """Raises when the sizes of the (text) config in `path` are not those of the tensors: rows and width of
    embedding, head and final norm, the decoder layers, and heads of keys. `known` is the same config with the
    defaults of its kind, where there are any."""
    embeddings = sorted(with_ending(headers, "embed_tokens.weight"), key=len)
    if not embeddings:
        return  # of another layout, which is told by who reads it
    start = embeddings[0].removesuffix("embed_tokens.weight")
    sizes = [(name, axis, key) for name in (embeddings[0], *with_ending(headers, "lm_head.weight")[:1])
             for axis, key in enumerate(("vocab_size", "hidden_size"))]
    for name, axis, key in [*sizes, (f"{start}norm.weight", 0, "hidden_size")]:
        header = headers.get(name)
        if header and header.dtype in PLAIN and header.shape[axis] != text[key]:
            raise UserError(f"{path} says {key} {text[key]}, but {name} in {header.file} has the size "
                            f"{header.shape}; {MENDED}")
    layers = _layers(headers, f"{start}layers.")
    _require_layers(path, text["num_hidden_layers"], layers)
    _require_key_heads(path, text, known, layers)


def _layers(headers: Mapping[str, Header], start: str) -> dict[int, dict[str, Header]]:
    """The tensors of each decoder layer, by their names in it."""
    found: dict[int, dict[str, Header]] = defaultdict(dict)
    for name, header in headers.items():
        number, _, rest = name.removeprefix(start).partition(".")
        if name.startswith(start) and number.isdigit():
            found[int(number)][rest] = header
    return found


def _require_layers(path: Path, count: int, layers: dict[int, dict[str, Header]]) -> None:
    """All layers are there, and none beyond them but those of another make, such as MTP modules."""
    ordinary = [{*tensors} for number, tensors in layers.items() if number < count]
    beyond = [number for number, tensors in layers.items() if number >= count and {*tensors} in ordinary]
    missing = next((number for number in range(count) if number not in layers), None)
    if layers and (missing is not None or beyond):
        said = f"an ordinary layer {max(beyond)} too" if missing is None else f"none of layer {missing}"
        raise UserError(f"{path} says num_hidden_layers {count}, but the weights beside it have tensors of "
                        f"the layers {min(layers)} to {max(layers)}, {said} (from 0 on); {MENDED}")


def _require_key_heads(path: Path, text: dict[str, Any], known: dict[str, Any] | None,
                       layers: dict[int, dict[str, Header]]) -> None:
    """By any layer's projection: in some models those of one kind of attention have sizes of their own."""
    heads, size = ((known or text).get(name) for name in ("num_key_value_heads", "head_dim"))
    found = [tensors["self_attn.k_proj.weight"] for number, tensors in sorted(layers.items())
             if number < text["num_hidden_layers"] and "self_attn.k_proj.weight" in tensors]
    plain = [header for header in found if header.dtype in PLAIN]
    if heads and size and plain and all(header.shape[0] != heads * size for header in plain):
        raise UserError(f"{path} says num_key_value_heads {text.get('num_key_value_heads')} and head_dim "
                        f"{text.get('head_dim')}, read as {heads} and {size}, but self_attn.k_proj.weight of "
                        f"layer {min(layers)} in {plain[0].file} has {plain[0].shape[0]} rows, expected "
                        f"{heads * size}; {MENDED}")


def with_ending(names: Mapping[str, Any], ending: str) -> list[str]:
    """Tensors of the language model whose last parts are `ending`, shortest first."""
    found = [name for name in names if name == ending or name.endswith("." + ending)]
    return sorted((name for name in found if "vision" not in name and "mtp" not in name), key=len)


def load_model(folder: Path, dtype: Any, trust_remote_code: bool) -> Any:
    """The target through transformers, on the CPU; raises unless every weight came from its files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # stages have their own
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, ignore_mismatched_sizes=True,
            output_loading_info=True, use_safetensors=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise UserError(f"the target in {folder} cannot be loaded by transformers ({type(error).__name__}: "
                        f"{' '.join(str(error).split())[:300]}); mend that, or set target_engine=vllm where "
                        "a server has it") from error
    if other := sorted(found["mismatched_keys"]):
        name, given, expected = other[0]
        raise UserError(f"{folder / 'config.json'} is not that of the weights beside it: {name} has the size "
                        f"{list(given)} there and {list(expected)} by the config, and so {len(other)} "
                        f"tensors; {MENDED}")
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"target folder {folder} lacks {len(missing)} of the tensors that its config.json "
                        f"asks for ({', '.join(missing[:3])}), which would be random; {MENDED}")
    return model
