"""Target and draft side by side, as their config files say it: what has to agree, and what a draft chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainer.export.described import FLAGS, SELECTOR, Described

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
         "vocab_size", "rms_norm_eps", "max_position_embeddings")


def beside(target: Mapping[str, Any], found: Described) -> str:
    """A table of lines; `target` is its (text) config, {} where that is not at hand."""
    shape, own = found.geometry, found.options
    rows: list[tuple[str, Any, Any]] = [("layers", target.get("num_hidden_layers", found.target_layers),
                                         shape["num_hidden_layers"])]
    rows += [(name, target.get(name), shape[name]) for name in SIZES]
    rope = target.get("rope_parameters") or {"rope_theta": target.get("rope_theta"),
                                             "rope_scaling": target.get("rope_scaling")}
    rows += [("rope", _line(rope) if target else None, _line(shape["rope_parameters"])),
             ("window", target.get("sliding_window"), "none, full attention"),
             ("causal", None if not target else "yes",
              "yes" if found.method == "eagle3" else "no, within a block"),
             ("after layers", None, ", ".join(map(str, own["tap_layers"]))),
             ("drafted tokens", None, f"{own['draft_vocab_size']} of {shape['vocab_size']}")]
    rows += [(name, None, own[name]) for name in ("block_size", "mask_token_id", *SELECTOR, "markov_rank",
                                                  "sample_from_anchor", *FLAGS) if name in own]
    cells = [("", "target", "draft"), *(tuple(_cell(each) for each in row) for row in rows)]
    first, second = (max(len(row[column]) for row in cells) for column in (0, 1))
    return "\n".join(f"  {name:<{first}}  {one:<{second}}  {two}".rstrip() for name, one, two in cells)


def _line(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value if isinstance(value, str | int | float) else json.dumps(value)[:40]}"
                     for name, value in rope.items() if value is not None)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
