"""Stage `prompts`: a source of conversations -> `prompts.jsonl`, each row marked `train` or `heldout`.

Rows are read whole, checked, and refused with file and line; nothing is repaired. A source may bring its own
split; otherwise `heldout` rows are taken by the hash of their text, so that adding rows moves few others. A
text that is held out is in no training prompt, whatever the source says. """

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trainer.data.prompt_rows import Row, parse_all, parse_line
from trainer.errors import UserError
from trainer.pipeline import Stage
from trainer.ranges import Amount, Count
from trainer.records import Prompt

Item = TypeVar("Item")
Text = tuple[str, tuple[str, ...]]  # what is asked: system text and turns


class PromptSource(ABC):
    """Where conversations come from."""

    quick: ClassVar[bool] = True  # False: rows may have to be fetched

    @property
    def commit(self) -> str | None:
        """The commit on the Hub that the rows are of; None for those of this machine."""
        return None

    @abstractmethod
    def rows(self) -> list[Row]: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the rows do."""


@dataclass(frozen=True)
class Jsonl(PromptSource):
    """A JSONL file: `{"turns": ["...", ...]}` or OpenAI `{"messages": [...]}`, optional id, system, category,
    language, split. Assistant messages become given answers."""

    path: str

    setting: ClassVar[str] = "prompts.source.path"  # that names the file, for messages

    def file(self) -> Path:
        return Path(self.path).expanduser()

    def rows(self) -> list[Row]:
        try:
            lines = self.file().read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.setting} {self.path} cannot be read ({error}); give a UTF-8 JSONL "
                            "file") from error
        rows = parse_all(((number, line) for number, line in enumerate(lines, 1) if line.strip()),
                         f"{self.path}, line", parse_line)
        if not rows:
            raise UserError(f"{self.setting} {self.path} holds no prompt; give one JSON object a line "
                            f'with "turns" or "messages"')
        return rows

    def fingerprint(self) -> str:
        try:
            return hashlib.sha256(self.file().read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise UserError(f"{self.setting} {self.path} cannot be read ({error.strerror}); give a JSONL "
                            "file") from error


@dataclass(frozen=True)
class Builtin(PromptSource):
    """The project's own prompts: chat, maths, code, tool use, Spanish and French, with a held-out part."""

    def rows(self) -> list[Row]:
        return Jsonl(str(self._path())).rows()

    def fingerprint(self) -> str:
        return Jsonl(str(self._path())).fingerprint()

    def _path(self) -> Path:
        return Path(__file__).with_name("builtin_prompts.jsonl")


@dataclass(frozen=True)
class Datasets(PromptSource):
    """A data set by name through `datasets`; `column` holds one text, a list of turns or of messages.

    One of the Hub is known by its revision: name a commit there, and nothing can move under a run. Of a
    branch the commit that it leads to is fetched, and recorded. A local folder is known by its files.
    """

    name: str
    config: str | None
    split: str
    column: str
    revision: str

    quick: ClassVar[bool] = False

    @cached_property
    def commit(self) -> str | None:  # type: ignore[override]
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError

        if Path(self.name).expanduser().is_dir():
            return None
        if re.fullmatch("[0-9a-f]{40}", self.revision):
            return self.revision
        try:
            return HfApi().dataset_info(self.name, revision=self.revision).sha
        except (HTTPError, OSError, ValueError) as error:
            raise UserError(f"prompts.source.revision={self.revision} of {self.name} could not be looked up "
                            f"on the Hub ({type(error).__name__}); check the name, the network and HF_TOKEN, "
                            "or name a commit, of which nothing is looked up") from error

    def rows(self) -> list[Row]:
        from datasets import load_dataset

        revision = self.commit or self.revision
        try:
            table = load_dataset(self.name, self.config, split=self.split, revision=revision)
        except (OSError, ValueError, ConnectionError) as error:
            raise UserError(f"prompts.source.name {self.name} (split {self.split}) cannot be loaded: "
                            f"{error}; check the name, the split, the revision and the network") from error
        if self.column not in table.column_names:
            raise UserError(f"prompts.source.column {self.column} is not in {self.name}; it has "
                            f"{', '.join(table.column_names)}")
        return parse_all(((number, _as_row(value)) for number, value in enumerate(table[self.column], 1)),
                         f"{self.name}, row")

    def fingerprint(self) -> str:
        folder = Path(self.name).expanduser()
        if not folder.is_dir():
            return self.revision
        digest = hashlib.sha256()
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Prompts(Stage):
    """`limit` takes the first rows of the training part (null: all); `heldout` different texts are kept from
    training. Repeated texts are counted and named."""

    source: PromptSource
    limit: Count | None
    heldout: Amount

    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1

    @property
    def quick(self) -> bool:
        return self.source.quick

    def external(self) -> dict[str, Any]:
        return {"source": self.source.fingerprint()}

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        rows = self.source.rows()
        train, heldout = split(rows, self.heldout)
        if not train[:self.limit]:
            raise UserError(self._nothing_left(rows))
        repeats = _repeats(rows, heldout)
        train = train[:self.limit]
        with (out / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for name, part in (("train", train), ("heldout", heldout)):
                for prompt in part:
                    file.write(json.dumps({**asdict(prompt), "split": name}, ensure_ascii=False) + "\n")
        known = {"commit": self.source.commit} if self.source.commit else {}
        return {"train": len(train), "heldout": len(heldout), **repeats, **known,
                "categories": dict(Counter(prompt.category for prompt in train)),
                "languages": dict(Counter(prompt.language for prompt in train))}

    def _nothing_left(self, rows: list[Row]) -> str:
        """Why there is no training prompt, and what to do."""
        if self.limit == 0:
            return "prompts.limit=0 leaves nothing to train on; set it to null for all prompts"
        if all(name == "heldout" for _, name in rows):
            return (f'all {len(rows)} prompts of the source are marked "split": "heldout", which leaves '
                    'nothing to train on; mark those to train on "train", or leave the mark out')
        texts = len({_text(prompt) for prompt, _ in rows})
        advice = "hold out fewer, for instance prompts.heldout=1" if texts > 1 else \
            ("give more of them (prompts=jsonl prompts.source.path=FILE prompts.heldout=1), or hold out none "
             "with prompts.heldout=0 and leave evaluate and report out of run=")
        return (f"prompts.heldout={self.heldout} leaves nothing to train on: the source has {texts} "
                f"different prompt{'s' if texts > 1 else ''}; {advice}")


def read_prompts(folder: Path) -> list[tuple[Prompt, str]]:
    """The prompts of a finished stage with their split, in order."""
    rows, path = [], folder / "prompts.jsonl"
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        raise UserError(f"{path} ends in the middle of a row; remove {folder} and run the same command again")
    for line in lines:
        row = json.loads(line)
        name = row.pop("split")
        rows.append((Prompt(**{**row, "turns": tuple(row["turns"]), "answers": tuple(row["answers"])}), name))
    return rows


def split(rows: list[Row], heldout: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. A split that the source gives is kept (held-out cut to `heldout`), but
    for repeated texts: they are held out once, and then not trained on."""
    given = _different([prompt for prompt, name in rows if name == "heldout"])
    free = [prompt for prompt, name in rows if name != "heldout"]
    if len(given) >= heldout:
        chosen = _spread(given, heldout)
    else:
        known = {_text(prompt) for prompt in given}
        others = _different([prompt for prompt in free if _text(prompt) not in known])
        picked = {prompt.id for prompt in sorted(others, key=_text_hash)[:heldout - len(given)]}
        chosen = given + [prompt for prompt in others if prompt.id in picked]
    texts = {_text(prompt) for prompt in chosen}
    return [prompt for prompt in free if _text(prompt) not in texts], chosen


def _repeats(rows: list[Row], heldout: list[Prompt]) -> dict[str, Any]:
    """How many rows repeat the text of an earlier one, and which of them the held-out part crowds out."""
    groups: dict[Text, list[str]] = {}
    for prompt, _ in rows:
        groups.setdefault(_text(prompt), []).append(prompt.id)
    repeated = [" = ".join(group[:4]) for group in groups.values() if len(group) > 1]
    out = [name for prompt in heldout for name in groups[_text(prompt)] if name != prompt.id]
    count = len(rows) - len(groups)
    if count:
        more = "; ..." if len(repeated) > 5 else ""
        print(f"prompts: {count} rows repeat the text of an earlier one ({'; '.join(repeated[:5])}{more}); "
              f"{len(out)} are left out, as their text is held out", flush=True)
    return {"repeated": count, "left_out": len(out), "left_out_ids": out[:20]}


def _spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, taken in turn from the categories, so that few of them still have all."""
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.category, prompt.language), []).append(prompt)
    chosen: list[Prompt] = []
    for depth in range(max(map(len, groups.values()), default=0)):
        chosen += [group[depth] for group in groups.values() if depth < len(group)]
    kept = {prompt.id for prompt in chosen[:count]}
    return [prompt for prompt in prompts if prompt.id in kept]


def _as_row(value: Any) -> Any:
    if isinstance(value, str):
        return {"turns": [value]}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {"messages": value}
    return {"turns": value}


def _different(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first prompt of each text."""
    found: dict[Text, Prompt] = {}
    for prompt in prompts:
        found.setdefault(_text(prompt), prompt)
    return list(found.values())


def _text(prompt: Prompt) -> Text:
    return prompt.system or "", prompt.turns


def _text_hash(prompt: Prompt) -> str:
    return hashlib.sha256("\n".join([prompt.system or "", *prompt.turns]).encode()).hexdigest()


def spread(items: Sequence[Item], count: int, category: Callable[[Item], str]) -> list[Item]:
    """At most `count` of the items, from every category in proportion and evenly within it."""
    ordered = sorted(items, key=category)
    count = min(count, len(ordered))
    return [ordered[number * len(ordered) // count] for number in range(count)]
