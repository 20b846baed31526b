"""The tensors that a drafter's config promises: names, shapes and kinds, for each method.

Names are those of `architectures` (vLLM's, without its prefix). What other layouts call otherwise is renamed
when it is read, and tables that follow from others are compared with them and left out, never dropped unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.architectures.tensors import FLOATS, INTEGERS
from trainer.errors import UserError
from trainer.export.described import SELECTOR, Described
from trainer.export.reading import MENDED

Shapes = dict[str, tuple[int, ...]]
TABLE = "d2t"
SHARED = ("embed_tokens.weight", "lm_head.weight")  # the target's, where a folder has none


def promised(found: Described) -> Shapes:
    """Every tensor that an engine needs of the drafter; it may have those of `optional` besides."""
    shape, own = found.geometry, found.options
    hidden, wide = shape["hidden_size"], own["target_hidden_size"]
    shapes: Shapes = {"fc.weight": (hidden, len(own["tap_layers"]) * wide), "norm.weight": (hidden,)}
    for index in range(shape["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": size for name, size in _layer(found, index == 0).items()}
    if found.method == "eagle3":
        shapes |= {"input_norm.weight": (len(own["tap_layers"]) * wide,)} if own["norm_before_fc"] else {}
        shapes |= {f"fc_norm.{index}.weight": (wide,) for index in range(len(own["tap_layers"]))
                   if own["fc_norm"]}
    else:
        shapes["hidden_norm.weight"] = (hidden,)
    if found.method == "dflash2":
        shapes |= _selector(found)
    if found.method == "dspark":
        rank = own["markov_rank"]
        shapes |= {"markov_head.markov_w1.weight": (shape["vocab_size"], rank),
                   "markov_head.markov_w2.weight": (own["draft_vocab_size"], rank)}
        if own["enable_confidence_head"]:
            read = hidden + (rank if own["confidence_head_with_markov"] else 0)
            shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    if found.reduced:
        shapes |= {"lm_head.weight": (own["draft_vocab_size"], hidden), TABLE: (own["draft_vocab_size"],)}
    if wide != hidden:  # the target's are of another width
        shapes |= optional(found)
    return shapes


def optional(found: Described) -> Shapes:
    shape = found.geometry
    return {"embed_tokens.weight": (shape["vocab_size"], shape["hidden_size"]),
            "lm_head.weight": (found.options["draft_vocab_size"], shape["hidden_size"])}


def _layer(found: Described, first: bool) -> Shapes:
    shape, chain = found.geometry, found.method == "eagle3"
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    read = 2 * hidden if chain and first else hidden
    queries, keys = (shape[name] * size for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
                      "self_attn.q_proj.weight": (queries, read), "self_attn.k_proj.weight": (keys, read),
                      "self_attn.v_proj.weight": (keys, read), "self_attn.o_proj.weight": (hidden, queries),
                      "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
                      "mlp.down_proj.weight": (hidden, inner)}
    if not chain or shape["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    if chain and first:
        shapes["hidden_norm.weight"] = (hidden,)
    if found.method == "dflash2":
        taps, group = found.options["conv_kernel_size"], found.options["conv_group_size"]
        for part in ("attention_conv", "mlp_conv"):
            shapes |= {f"{part}.base_kernel": (2, taps, hidden),
                       f"{part}.kernel_projection.weight": (2 * taps * (hidden // group), hidden)}
    return shapes


def _selector(found: Described) -> Shapes:
    rank, hidden = found.options[SELECTOR[2]], found.geometry["hidden_size"]
    books = dict.fromkeys(("predecessor_codebook", "successor_codebook"),
                          (found.geometry["vocab_size"], rank))
    return {f"candidate_selector.{name}": size for name, size in
            {**books, "hidden_projection.weight": (rank, hidden)}.items()}


def renamed(found: Described, tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """The tensors by the names of `promised`: those of a first layer that is called `midlayer`, and codebooks
    of a selector that are called weights. Tables of the vocabulary that follow from d2t, and one that names
    every token, are left out once they were found to say the same."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        new = new.removesuffix(".weight") if new.endswith("codebook.weight") else new
        if new in named:
            raise UserError(f"{place} has both {name} and another name of the same tensor; {MENDED}")
        named[new] = tensor
    table, member = named.get(TABLE), named.pop("t2d", None)
    total = found.geometry["vocab_size"]
    if table is not None and not found.reduced:
        if table.shape != (total,) or bool(table.any()):
            raise UserError(f"{place} has a d2t, but its config.json says draft_vocab_size "
                            f"{found.options['draft_vocab_size']}, all of the target's tokens; {MENDED}")
        del named[TABLE]
    if member is not None:
        ids = torch.arange(total) if TABLE not in named else _ids(named[TABLE])
        if member.shape != (total,) or member.dtype != torch.bool \
                or not torch.equal(member.nonzero().flatten(), ids.to(torch.int64)):
            raise UserError(f"{place} has a t2d that does not name the tokens of its d2t; {MENDED}")
    return named


def _ids(table: Tensor) -> Tensor:
    plain = table.ndim == 1 and table.dtype in INTEGERS
    return table + torch.arange(len(table)) if plain else torch.arange(0)


def require_tensors(found: Described, tensors: Mapping[str, Tensor], place: str,
                    refused: tuple[str, ...] = (), needed: tuple[str, ...] = (), finite: bool = True) -> None:
    """Raises unless the tensors are all that the config promises (and those `needed`), and nothing else but
    what may be there besides (and is not `refused`), in shape and kind, with a table of ascending ids and
    `finite` numbers."""
    wanted = promised(found) | {name: size for name, size in optional(found).items() if name in needed}
    extra = {name: size for name, size in optional(found).items() if name not in (*wanted, *refused)}
    wrong = [text for name in sorted({*wanted, *tensors})
             if (text := _difference(name, {**extra, **wanted}.get(name), tensors.get(name), finite))]
    if wrong:
        raise UserError(f"{place}: {len(wrong)} tensors are not those of its config.json "
                        f"({'; '.join(wrong[:3])}); {MENDED}")
    if TABLE in tensors:
        ids, total = _ids(tensors[TABLE]), found.geometry["vocab_size"]
        if int(ids[0]) < 0 or int(ids[-1]) >= total or not bool((ids.diff() > 0).all()):
            raise UserError(f"{place}: d2t does not name ascending ids of the target's {total} tokens "
                            "(target id = row + d2t[row]); it holds the ids themselves, or is of another "
                            "target")


def membership(table: Tensor, total: int) -> Tensor:
    """`t2d` [V] bool of a `d2t`: which target tokens are in the draft vocabulary."""
    return torch.zeros(total, dtype=torch.bool).index_fill(0, _ids(table), True)


def _difference(name: str, wanted: tuple[int, ...] | None, found: Tensor | None, finite: bool) -> str | None:
    kinds = INTEGERS if name == TABLE else FLOATS
    sizes = wanted, None if found is None else found.shape
    shown = [None if each is None else list(each) for each in sizes]
    if wanted is None or found is None or shown[0] != shown[1]:
        return f"{name[:80]}: expected {shown[0] or 'none'}, found {shown[1] or 'none'}"
    if found.dtype not in kinds:
        return f"{name}: expected {' or '.join(map(str, kinds))}, found {found.dtype}"
    if finite and name != TABLE and not bool(found.isfinite().all()):
        return f"{name}: expected finite numbers, found others"
    return None


def kept(tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors without those of `SHARED` that are the target's, bit for bit, as `shared` has them."""
    return {name: tensor for name, tensor in tensors.items()
            if not (name in shared and tensor.dtype == shared[name].dtype
                    and torch.equal(tensor, shared[name]))}
