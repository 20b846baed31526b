"""The target: facts that every room needs, and where its files lie.

A `Target` says which folder holds the model that will be served, and the few facts that cannot be read from
its files (which unused token serves as mask, which layers are tapped, how its chat template is called). Where
the folder comes from is a node of its own: a local `Folder`, a Hub repository, or one that `target_made`
makes. """

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trainer._weight_files import INDEX
from trainer.errors import UserError
from trainer.ranges import Amount, Layers, SequenceLength
from trainer.target_fit import json_object, require_fit, require_readable, whole_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
IDENTITY_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
                  "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
MORE_FILES = ("vocab.json", "merges.txt", "added_tokens.json", "additional_chat_templates/*", "*.py")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings")  # may stand beside a text part and hold for it
SAMPLED = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1.0, 1e9), "min_p": (0.0, 1.0),
           "repetition_penalty": (1e-3, 100.0)}  # in generation_config.json, with their bounds
UNTOLD = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
BRACKETED = re.compile(r"<.+>|\[.+\]")


class TargetSource(ABC):
    """Where the target's folder comes from."""

    @abstractmethod
    def folder(self) -> Path:
        """The complete local folder; may download or make it the first time."""

    @property
    def served(self) -> str:
        """What a server is told to load: the folder, or a name on the Hub."""
        return str(self.folder())


    @property
    def commit(self) -> str | None:
        """The commit on the Hub that the folder is a download of; None for any other folder."""
        return None


@dataclass(frozen=True)
class Folder(TargetSource):
    path: str

    def folder(self) -> Path:
        return Path(self.path).expanduser().resolve()


@dataclass(frozen=True)
class Hub(TargetSource):
    """A Hub repository at a revision. Where that is a branch, what it led to is printed, and told in
    `commit`, so that a run can be repeated."""

    repo: str
    revision: str

    @property
    def served(self) -> str:
        return self.repo

    @property
    def commit(self) -> str | None:
        return self.folder().name  # as the cache of the Hub names it

    def folder(self) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            found = Path(snapshot_download(self.repo, revision=self.revision, allow_patterns=[
                "*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"target {self.repo}@{self.revision} could not be fetched from the Hub "
                            f"({type(error).__name__}); check the name, the network and HF_TOKEN, or point "
                            f"target.source at a local folder") from error
        if found.name != self.revision:
            _told(self.repo, self.revision, found.name)
        return found


@cache
def _told(repo: str, revision: str, commit: str) -> None:
    """Once a process, since every room asks for the folder."""
    print(f"target: {repo}@{revision} is commit {commit}; target.source.revision={commit} keeps it",
          flush=True)


@dataclass(frozen=True)
class Target:
    """`mask_token` is a token of the target's own vocabulary that it never emits (text or id); `tap_layers`
    are in the convention of `records`; `template` goes to the chat template as keyword arguments."""

    name: str
    source: TargetSource
    mask_token: str | Amount
    tap_layers: Layers
    template: dict[str, Any]
    max_length: SequenceLength
    trust_remote_code: bool

    @cached_property
    def folder(self) -> Path:
        folder = self.source.folder()
        check_folder(folder)
        return folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The text part of config.json."""
        return text_part(json.loads((self.folder / "config.json").read_text()))

    @property
    def nested(self) -> bool:
        """Whether it is a multimodal model, whose config.json has the text part inside."""
        return "text_config" in json.loads((self.folder / "config.json").read_text())

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise UserError(f"the tokenizer in {self.folder} cannot be loaded ({reason}); fetch its files "
                            "again, or install what they need") from error

    @cached_property
    def identity(self) -> str:
        """16 hex digits that change with the weights, the configuration, the tokenizer or the template."""
        return folder_identity(self.folder)

    @property
    def facts(self) -> dict[str, str]:
        """What decides answers and states, for the fingerprints of stages. The arguments of the template are
        hashed, since among settings those with names like `token` would be masked."""
        found = {"target": self.identity}
        if self.template:
            text = json.dumps(self.template, sort_keys=True)
            found["template"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return found

    @property
    def template_hash(self) -> str:
        text = (self.tokenizer.chat_template or "") + json.dumps(self.template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def mask_token_id(self) -> int:
        """The id of `mask_token`, which must be an existing row that neither begins nor ends texts."""
        rows, token = self.config["vocab_size"], self.mask_token
        found = token if isinstance(token, int) else self.tokenizer.get_vocab().get(token)
        if found is None or not 0 <= found < rows:
            raise UserError(f"target.mask_token {token!r} is not one of the {rows} rows of {self.name}'s "
                            f"embedding; choose an unused token, for example one of {self.unused_tokens()}")
        reserved = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, *self.end_ids}
        if found in reserved:
            raise UserError(f"target.mask_token {token!r} (id {found}) begins or ends {self.name}'s texts, "
                            "so it has a meaning; choose an unused token, for example one of "
                            f"{self.unused_tokens()}")
        if meaning := self._meaning(found):
            raise UserError(f"target.mask_token {token!r} (id {found}) {meaning}, so it has a meaning for "
                            f"{self.name}; choose an unused token, for example one of {self.unused_tokens()}")
        return found

    def _meaning(self, token: int) -> str | None:
        """What a token of the vocabulary is used for; None for one that may be unused: those beyond the
        tokenizer, those that were added to it, and those in brackets, such as <unused7>."""
        if token >= len(self.tokenizer):
            return None
        text = self.tokenizer.convert_ids_to_tokens(token) or ""
        if token not in self.tokenizer.added_tokens_decoder and not BRACKETED.fullmatch(text):
            return "is an ordinary token of texts"
        return "stands in the chat template" if text in str(self.tokenizer.chat_template or "") else None

    def require_length(self, length: int, setting: str) -> None:
        """Raises unless the target has positions for sequences of `length` tokens, which `setting` says."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        longest = self.config.get("max_position_embeddings")
        # some name the length before their positions are stretched: then it is no more than this
        if longest is not None and length > longest * float(rope.get("factor") or 1):
            setting = "target.max_length" if length == self.max_length else setting
            raise UserError(f"{setting}={length} is more than the {longest} positions of {self.name} "
                            "(max_position_embeddings in its config.json); lower it")

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids at which generation stops: those of generation_config.json, config.json and the tokenizer."""
        found: list[int] = []
        path = self.folder / "generation_config.json"
        for source in ([json.loads(path.read_text())] if path.is_file() else []) + [self.config]:
            ids = source.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids] if ids is not None else []
        if self.tokenizer.eos_token_id is not None:
            found.append(self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(found))

    @property
    def generation(self) -> dict[str, float]:
        """How a server samples from it that is told nothing: what its generation_config.json says, as vLLM
        reads it (which has no regard to `do_sample`), and else temperature 1 and nothing left out."""
        path = self.folder / "generation_config.json"
        if not path.is_file():
            raise UserError(f"the target's folder {self.folder} has no generation_config.json to sample by; "
                            "set responses.sampling_of=settings and responses.sampling.*")
        given, found = json_object(path), dict(UNTOLD)
        for name, (least, most) in SAMPLED.items():
            value = given.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise UserError(f"{path} says {name} {value!r}, expected a number from {least:g} to "
                                f"{most:g}; mend it, or set responses.sampling_of=settings")
            found[name] = value
        return {**found, "top_k": int(max(0, found["top_k"]))}

    def unused_tokens(self) -> list[str | int]:
        """Suggestions for `mask_token`: rows beyond the tokenizer; else the newest added tokens or, where
        none was added, the last of the vocabulary, which are rare."""
        spare = list(range(len(self.tokenizer), self.config["vocab_size"]))
        reserved = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, *self.end_ids}
        for vocabulary in (self.tokenizer.get_added_vocab(), self.tokenizer.get_vocab()):
            ordered = sorted(vocabulary, key=vocabulary.get)
            names = [token for token in ordered if vocabulary[token] not in reserved]
            if names:
                break
        return spare[:4] or names[-4:]


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """That of a config.json, which multimodal targets nest, with what the whole says for it."""
    whole = {key: config[key] for key in OF_THE_WHOLE if key in config}
    return {**whole, **config["text_config"]} if "text_config" in config else config


def check_folder(folder: Path) -> None:
    """Raises one sentence for each way in which a target folder can be unusable."""
    if not (folder / "config.json").is_file():
        raise UserError(f"target folder {folder} has no config.json; give the folder of a complete Hugging "
                        "Face model")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"target folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
                        f"copy the tokenizer files of the model into it")
    for name in (*IDENTITY_FILES, INDEX):
        if name.endswith(".json") and (folder / name).is_file():
            json_object(folder / name)
    text = _check_sizes(folder / "config.json")
    known = require_readable(folder / "config.json", json_object(folder / "config.json"), text)
    require_fit(folder / "config.json", text, known, whole_weights(folder))


def _check_sizes(path: Path) -> dict[str, Any]:
    """The text part, which says how large a decoder it is."""
    config = json_object(path)
    config = text_part(config) if isinstance(config.get("text_config", {}), dict) else {}
    for name in SIZES:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f"{path} says {name} {value!r}, expected a number of at least 1; it is not the "
                            "config of a decoder, or damaged: fetch it again")
    return config


def folder_identity(folder: Path) -> str:
    """Hash of the small files' bytes, and of every weight file's size, header and 64 spread-out pages.

    Reading all bytes of a large target would take minutes; a retrained tensor changes pages everywhere.
    """
    digest = hashlib.sha256()
    for name in IDENTITY_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    for path in sorted(each for pattern in MORE_FILES for each in folder.glob(pattern) if each.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for index in range(64):
                file.seek(size * index // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]
