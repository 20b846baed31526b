"""Stage `prompts`: a source of conversations -> `prompts.jsonl`, each row marked `train` or `heldout`.

Rows are read whole, checked, and left out with file and line where they are none; nothing is repaired. A
source may bring its own split; otherwise `heldout` rows are taken by the hash of their text (`splits`). What
was read and left out, and why, lies beside the rows, for the report on the data.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.data.base import PromptSource
from trainer.data.duplicates import Duplicates
from trainer.data.languages import Detection
from trainer.data.prompt_rows import Row, parse_all, parse_line, require_few
from trainer.data.splits import CROWDED, Dropped, crowded_out, repeats, split, text_of
from trainer.data.thinking import Thinking, modes
from trainer.errors import UserError
from trainer.pipeline import Stage
from trainer.ranges import Amount, Count, Share
from trainer.records import UNKNOWN, Prompt

FACTS = "prompts.json"  # what was read and left out; in the folder of every finished stage
OPTIONAL = ("messages", "template")  # of a prompt, written where there is something


@dataclass(frozen=True)
class Jsonl(PromptSource):
    """A JSONL file: `{"turns": ["...", ...]}` or OpenAI `{"messages": [...]}`, optional id, system, category,
    language, split. Assistant messages become given answers."""

    path: str

    setting: ClassVar[str] = "prompts.source.path"  # that names the file, for messages

    def file(self) -> Path:
        return Path(self.path).expanduser()

    def rows(self, bad: list[str]) -> list[Row]:
        try:
            rows = parse_all(self._lines(), bad, parse_line)
        except OSError as error:
            raise UserError(f"{self.setting} {self.path} cannot be read ({error}); give a UTF-8 JSONL "
                            "file") from error
        if not rows and not bad:
            raise UserError(f"{self.setting} {self.path} holds no prompt; give one JSON object a line "
                            f'with "turns" or "messages"')
        return rows

    def fingerprint(self) -> str:
        try:
            with self.file().open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        except OSError as error:
            raise UserError(f"{self.setting} {self.path} cannot be read ({error.strerror}); give a JSONL "
                            "file") from error

    def _lines(self) -> Iterator[tuple[str, int, bytes]]:
        """The lines that are not blank; only what ends in a newline is one."""
        with self.file().open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield f"{self.path}, line {number}", number, line


@dataclass(frozen=True)
class Builtin(PromptSource):
    """The project's own prompts: chat, maths, code, tool use, Spanish and French, with a held-out part."""

    def rows(self, bad: list[str]) -> list[Row]:
        return Jsonl(str(self._path())).rows(bad)

    def fingerprint(self) -> str:
        return Jsonl(str(self._path())).fingerprint()

    def _path(self) -> Path:
        return Path(__file__).with_name("builtin_prompts.jsonl")


@dataclass(frozen=True)
class Prompts(Stage):
    """`limit` takes the first rows of the training part (null: all); `heldout` different texts are kept from
    training. Rows that are none are left out while they are no more than `max_bad_share` of all. Repeated
    texts are counted and named, and with `duplicates` left out, as are those that are nearly the same.
    `languages` finds the language of rows that say none; null: it stays unknown. `thinking` says which rows
    that do not say it themselves are to think; null: as the target's template has it."""

    source: PromptSource
    limit: Count | None
    heldout: Amount
    max_bad_share: Share
    duplicates: Duplicates | None
    languages: Detection | None
    thinking: Thinking | None

    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any]] = {"max_bad_share": 0.0, "duplicates": None, "languages": None,
                                             "thinking": None}

    @property
    def quick(self) -> bool:
        return self.source.quick

    def external(self) -> dict[str, Any]:
        return {"source": self.source.fingerprint()}

    def preflight(self) -> None:
        if self.languages:
            self.languages.require()

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        bad: list[str] = []
        rows = self.source.rows(bad)
        require_few(bad, len(rows), self.max_bad_share)
        rows, found = self._languages(rows)
        train, heldout = split(rows, self.heldout)
        if not train[:self.limit]:
            raise UserError(self._nothing_left(rows))
        counts = repeats(rows, heldout)
        dropped = crowded_out(rows, heldout)
        if self.duplicates:
            train, near = self.duplicates.without(train, heldout)
            dropped += near
            if not train:
                raise UserError("prompts.duplicates leaves nothing to train on: every prompt is near to one "
                                "that is held out; hold out fewer, or set it to null")
        kept = train[:self.limit]
        if self.thinking:
            kept, heldout = self.thinking.told(kept), self.thinking.told(heldout)
        with (out / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for name, part in (("train", kept), ("heldout", heldout)):
                file.writelines(_line(prompt, name) for prompt in part)
        facts = {"read": len(rows) + len(bad), "kept": len(kept) + len(heldout), "train": len(kept),
                 "heldout": len(heldout), "repeated": counts["repeated"], "languages": found, "bad": bad,
                 "dropped": [asdict(each) for each in dropped], "thinking": modes([*kept, *heldout])}
        (out / FACTS).write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        _tell(bad, dropped)
        if self.thinking:
            print("prompts: thinking " + ", ".join(f"{name} in {count}" for name, count in
                                                    sorted(facts["thinking"].items())), flush=True)
        return {"train": len(kept), "heldout": len(heldout), **counts, "bad": len(bad), "bad_rows": bad[:20],
                "near": sum(each.why.startswith("near") for each in dropped),
                "categories": dict(Counter(prompt.category for prompt in kept)),
                "languages": dict(Counter(prompt.language for prompt in kept)),
                "thinking": facts["thinking"]}

    def _languages(self, rows: list[Row]) -> tuple[list[Row], dict[str, int]]:
        """The rows with their languages, and of how many it is said, detected and unknown."""
        silent = sum(prompt.language == UNKNOWN for prompt, _ in rows)
        if silent and self.languages:
            self.languages.require()
            rows = self.languages.tagged(rows)
            rest = sum(prompt.language == UNKNOWN for prompt, _ in rows)
            print(f"prompts: {silent} of the {len(rows)} rows do not say their language; that of "
                  f"{silent - rest} was detected, that of {rest} stays unknown", flush=True)
        unknown = sum(prompt.language == UNKNOWN for prompt, _ in rows)
        return rows, {"said": len(rows) - silent, "detected": silent - unknown, "unknown": unknown}

    def _nothing_left(self, rows: list[Row]) -> str:
        """Why there is no training prompt, and what to do."""
        if self.limit == 0:
            return "prompts.limit=0 leaves nothing to train on; set it to null for all prompts"
        if not rows:
            return "no row of the source is a conversation; mend them, or name another prompts.source"
        if all(name == "heldout" for _, name in rows):
            return (f'all {len(rows)} prompts of the source are marked "split": "heldout", which leaves '
                    'nothing to train on; mark those to train on "train", or leave the mark out')
        texts = len({text_of(prompt) for prompt, _ in rows})
        advice = "hold out fewer, for instance prompts.heldout=1" if texts > 1 else \
            ("give more of them (prompts=jsonl prompts.source.path=FILE prompts.heldout=1), or hold out none "
             "with prompts.heldout=0 and leave evaluate and report out of run=")
        return (f"prompts.heldout={self.heldout} leaves nothing to train on: the source has {texts} "
                f"different prompt{'s' if texts > 1 else ''}; {advice}")


def read_prompts(folder: Path) -> list[tuple[Prompt, str]]:
    """The prompts of a finished stage with their split, in order."""
    return [*iterate_prompts(folder)]


def iterate_prompts(folder: Path) -> Iterator[tuple[Prompt, str]]:
    """The same, one after the other, none of which stays in memory."""
    path = folder / "prompts.jsonl"
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                raise UserError(f"{path} ends in the middle of a row; remove {folder} and run the same "
                                "command again")
            row = json.loads(line)
            name = row.pop("split")
            listed = {key: tuple(row[key]) for key in ("turns", "answers", "messages") if key in row}
            yield Prompt(**{**row, **listed}), name


def _line(prompt: Prompt, split: str) -> str:
    row = {key: value for key, value in asdict(prompt).items() if value or key not in OPTIONAL}
    return json.dumps({**row, "split": split}, ensure_ascii=False) + "\n"


def _tell(bad: list[str], dropped: list[Dropped]) -> None:
    """What was left out, so that nobody has to look for it."""
    for what in [*bad[:5], *(["..."] if len(bad) > 5 else [])]:
        print(f"prompts: left out: {what}", flush=True)
    for why, count in Counter(each.why for each in dropped if each.why != CROWDED).items():
        first = next(each for each in dropped if each.why == why)
        print(f"prompts: {count} left out of training, {why} (first: {first.id}, {first.of})", flush=True)
