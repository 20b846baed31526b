"""The target's frozen embedding, final norm and head, read from its safetensors alone.

Nothing else of the target is loaded: a trainer needs these three matrices and never the layers between them.
Names are resolved through the index (or the only file) by their endings, so that prefixes of multimodal
targets and tied embeddings need no table of families. """

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer._weight_files import INDEX, indexed
from trainer.errors import UserError
from trainer.target_fit import with_ending


@dataclass(frozen=True)
class TargetHead:
    """embedding [V, H], norm [H], head [V, H], all in the dtype of the file.

    `norm_offset` is 1.0 for families whose norm multiplies by (1 + w), else 0.0; `logit_scale` and `softcap`
    follow the target's config. """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    eps: float
    norm_offset: float
    logit_scale: float
    softcap: float | None

    def normed(self, last: Tensor) -> Tensor:
        """Final norm of `last` [..., H], which comes before it; in float32, returned in `last`'s dtype."""
        wide = last.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.norm.to(last.device)
        if self.norm_offset:
            return (wide * (self.norm_offset + weight.float())).to(last.dtype)
        return weight.to(last.dtype) * wide.to(last.dtype)

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """float32 logits [..., V] of the target, or only the given vocabulary `rows`."""
        head = self.head if rows is None else self.head[rows.to(self.head.device)]
        logits = F.linear(self.normed(last), head.to(last.device, last.dtype)).float() * self.logit_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]


OFFSET_NORMS = ("gemma", "qwen3_next", "qwen3_5")  # model types whose RMSNorm multiplies by (1 + weight),
PLAIN_NORMS = ("gemma3n", "gemma4")  # and those of the same beginning whose RMSNorm does not

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool}  # as files name them


def load_target_head(folder: Path, config: dict[str, Any], values: bool = True) -> TargetHead:
    """`config` is the (text) config of the target in `folder`; without `values` the tensors are on the device
    meta."""
    embedding, norm, head = head_names(folder, config)
    tensors = (read_tensors if values else tensor_shapes)(folder, {embedding, norm, head})
    tied = values and config.get("tie_word_embeddings") is True and head != embedding
    if tied and not torch.equal(tensors[embedding], tensors[head]):
        raise UserError(f"target folder {folder} has an lm_head.weight other than its embedding, and its "
                        "config.json says tie_word_embeddings=true: a server would take the embedding; mend "
                        "config.json, or fetch the checkpoint again")
    kind = str(config.get("model_type", ""))
    offset = 1.0 if kind.startswith(OFFSET_NORMS) and not kind.startswith(PLAIN_NORMS) else 0.0
    return TargetHead(tensors[embedding], tensors[norm], tensors[head], float(config["rms_norm_eps"]), offset,
                      1.0 / float(config.get("logits_scaling", 1.0)), config.get("final_logit_softcapping"))


def head_names(folder: Path, config: dict[str, Any]) -> tuple[str, str, str]:
    """Names of the embedding, the final norm and the head, which is the embedding where there is no other;
    raises when one is missing, or the constant of the norm. No tensor is read."""
    names = tensor_names(folder)
    if config.get("rms_norm_eps") is None:
        raise UserError(f"{folder / 'config.json'} has no rms_norm_eps, so the target's final norm would be "
                        "guessed; write it into the file, or choose a target with RMS norms")
    embedding = _ending(names, "embed_tokens.weight", folder)
    norm = _ending(names, "model.norm.weight", folder, alternatives=("language_model.norm.weight",))
    heads = with_ending(names, "lm_head.weight")
    if config.get("tie_word_embeddings") is False and not heads:
        raise UserError(f"target folder {folder} has no lm_head.weight, and its config.json says "
                        "tie_word_embeddings=false, so its head is missing; fetch the whole checkpoint, or "
                        "say tie_word_embeddings=true where the embedding is the head")
    return embedding, norm, heads[0] if heads else embedding


def tensor_names(folder: Path) -> dict[str, Path]:
    """Every tensor of a checkpoint folder and the file that holds it."""
    from safetensors import safe_open

    index = folder / INDEX
    if index.is_file():
        return {name: folder / file for name, file in indexed(index, "fetch it again").items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def read_tensors(folder: Path, wanted: Iterable[str]) -> dict[str, Tensor]:
    """The wanted tensors, read from their shards alone."""
    from safetensors import SafetensorError, safe_open

    names = tensor_names(folder)
    tensors = {}
    for name in wanted:
        if name not in names:
            raise UserError(f"target folder {folder} has no tensor {name}; its checkpoint is of another "
                            "layout")
        try:
            with safe_open(names[name], framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{names[name]} cannot be read ({error}); fetch it again") from error
    return tensors


def tensor_shapes(folder: Path, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Size and dtype of the wanted tensors, without their values: on the device meta, of dtype uint8 where it
    is none of the usual ones."""
    from safetensors import safe_open

    names, found = tensor_names(folder), {}
    for name in wanted:
        with safe_open(names[name], framework="pt") as file:
            part = file.get_slice(name)
            found[name] = torch.empty(part.get_shape(), device="meta",
                                      dtype=DTYPES.get(part.get_dtype(), torch.uint8))
    return found


def _ending(names: dict[str, Path], ending: str, folder: Path, alternatives: tuple[str, ...] = ()) -> str:
    for wanted in (ending, *alternatives):
        if found := with_ending(names, wanted):
            return found[0]
    raise UserError(f"target folder {folder} has no tensor ending in {ending}; its checkpoint is of another "
                    "layout")
