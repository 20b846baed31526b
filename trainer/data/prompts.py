"""Stage `prompts`: a source of conversations -> `prompts.jsonl`, each row marked `train` or `heldout`.

Rows are read whole, checked, and refused with file and line; nothing is repaired. A source may bring its own
split; otherwise `heldout` rows are taken by the hash of their text, so that adding rows moves few others. """

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.errors import UserError
from trainer.pipeline import Stage
from trainer.ranges import Amount, Count
from trainer.records import Prompt

Row = tuple[Prompt, str | None]  # a prompt and, where the source says so, its split


class PromptSource(ABC):
    """Where conversations come from."""

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

    def file(self) -> Path:
        return Path(self.path).expanduser()

    def rows(self) -> list[Row]:
        try:
            lines = self.file().read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"prompts.source.path {self.path} cannot be read ({error}); give a UTF-8 JSONL "
                            f"file") from error
        rows = [parse_row(line, f"{self.path}, line {number}", number)
                for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise UserError(f"prompts.source.path {self.path} holds no prompt; give one JSON object a line "
                            f'with "turns" or "messages"')
        return rows

    def fingerprint(self) -> str:
        try:
            return hashlib.sha256(self.file().read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise UserError(f"prompts.source.path {self.path} cannot be read ({error.strerror}); give a "
                            "JSONL file") from error


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

    One of the Hub is known by its revision: name a commit there, and nothing can move under a run. A local
    folder is known by its files.
    """

    name: str
    config: str | None
    split: str
    column: str
    revision: str

    def rows(self) -> list[Row]:
        from datasets import load_dataset

        try:
            table = load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except (OSError, ValueError, ConnectionError) as error:
            raise UserError(f"prompts.source.name {self.name} (split {self.split}) cannot be loaded: "
                            f"{error}; check the name, the split, the revision and the network") from error
        if self.column not in table.column_names:
            raise UserError(f"prompts.source.column {self.column} is not in {self.name}; it has "
                            f"{', '.join(table.column_names)}")
        return [parse_object(_as_row(value), f"{self.name}, row {number}", number)
                for number, value in enumerate(table[self.column], 1)]

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
    """`limit` takes the first rows of the training part (null: all); `heldout` rows are kept from training,
    of which as many must exist."""

    source: PromptSource
    limit: Count | None
    heldout: Amount

    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1

    def external(self) -> dict[str, Any]:
        return {"source": self.source.fingerprint()}

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        rows = _unique(self.source.rows())
        train, heldout = split(rows, self.heldout)
        train = train[:self.limit]
        if not train:
            key = "limit" if self.limit == 0 else "heldout"
            raise UserError(f"prompts.{key}={getattr(self, key)} leaves nothing to train on: the source has "
                            f"{len(rows)} different prompts; change it")
        with (out / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for name, part in (("train", train), ("heldout", heldout)):
                for prompt in part:
                    file.write(json.dumps({**asdict(prompt), "split": name}, ensure_ascii=False) + "\n")
        return {"train": len(train), "heldout": len(heldout),
                "categories": dict(Counter(prompt.category for prompt in train)),
                "languages": dict(Counter(prompt.language for prompt in train))}


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
    """Training and held-out prompts. A split that the source gives is kept (held-out cut to `heldout`)."""
    given = [prompt for prompt, name in rows if name == "heldout"]
    free = [prompt for prompt, name in rows if name != "heldout"]
    if len(given) >= heldout:
        return free, _spread(given, heldout)
    chosen = {prompt.id for prompt in sorted(free, key=_text_hash)[:heldout - len(given)]}
    return ([prompt for prompt in free if prompt.id not in chosen],
            given + [prompt for prompt in free if prompt.id in chosen])


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


def parse_row(line: str, where: str, number: int) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); write one JSON "
                        "object a line") from error
    return parse_object(row, where, number)


def parse_object(row: Any, where: str, number: int) -> Row:
    """One row to a prompt; raises with `where` when it has neither usable `turns` nor `messages`."""
    if not isinstance(row, dict) or not ("turns" in row or "messages" in row):
        raise UserError(f'{where}: expected an object with "turns" or "messages", found {str(row)[:60]}')
    system, answers = row.get("system"), row.get("answers", [])
    if "messages" in row:
        system, turns, answers = _from_messages(row["messages"], where)
    else:
        turns = row["turns"]
    if not _are_texts(turns) or not turns or not all(turn.strip() for turn in turns):
        raise UserError(f'{where}: "turns" must be a list of texts that are not empty, found '
                        f'{str(turns)[:60]}')
    if not _are_texts(answers):
        raise UserError(f'{where}: "answers" must be a list of texts, found {str(answers)[:60]}')
    if not isinstance(system, str | None):
        raise UserError(f'{where}: "system" must be a text, found {str(system)[:60]}')
    name = row.get("split")
    if name not in (None, "train", "heldout"):
        raise UserError(f'{where}: "split" must be "train" or "heldout", found {name!r}')
    return Prompt(id=str(row.get("id", f"row-{number}")), turns=tuple(turns), system=system,
                  category=row.get("category", "chat"), language=row.get("language", "en"),
                  answers=tuple(answers)), name


def _from_messages(messages: Any, where: str) -> tuple[str | None, list[str], list[str]]:
    """OpenAI messages -> system text, user turns, given answers. User and assistant alternate."""
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and _are_texts([m.get("role"), m.get("content")]) for m in messages):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and a text "content"')
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    for index, message in enumerate(rest):
        expected = "assistant" if index % 2 else "user"
        if message["role"] != expected:
            raise UserError(f'{where}: message {index + 1} has role {message["role"]!r}, expected '
                            f"{expected!r}; user and assistant must alternate")
    return system, [m["content"] for m in rest[::2]], [m["content"] for m in rest[1::2]]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _as_row(value: Any) -> Any:
    if isinstance(value, str):
        return {"turns": [value]}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {"messages": value}
    return {"turns": value}


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Refuses a repeated id: it would make two rows one in every later stage."""
    found: dict[str, Row] = {}
    for prompt, name in rows:
        if prompt.id in found:
            raise UserError(f"prompt id {prompt.id!r} occurs twice; ids must be unique, rename one of them")
        found[prompt.id] = (prompt, name)
    return list(found.values())


def _text_hash(prompt: Prompt) -> str:
    return hashlib.sha256("\n".join([prompt.system or "", *prompt.turns]).encode()).hexdigest()
