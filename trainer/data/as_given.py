"""Stage `responses` of answers that the data brings: conversations are tokenised one after the other, and
none stays in memory. A killed run goes on behind the last conversations that are whole on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from trainer.data import report
from trainer.data.chat import Chat
from trainer.data.off_policy import OffPolicy
from trainer.data.prompts import iterate_prompts
from trainer.data.response_rows import RESPONSES, Row, read_rows
from trainer.data.responses import TOO_LONG, Length, Placed
from trainer.data.slices import thinking as mode_of
from trainer.data.tally import Tally, describe
from trainer.data.thinking import Thinking
from trainer.errors import UserError
from trainer.pipeline import Stage
from trainer.progress import Progress
from trainer.ranges import SequenceLength
from trainer.records import Prompt
from trainer.target import Target

NOTHING: dict[str, Any] = {"done": 0, "bytes": 0, "dropped": []}
COMMIT = 500  # conversations after which what is there is on the disk


@dataclass(frozen=True)
class AsGiven(Stage):
    """Keeps the answers that the data brings (off-policy); the mask comes from the chat template. How likely
    the target finds them is measured, unless `off_policy` is null. `thinking` is that of the prompts."""

    target: Target
    max_length: SequenceLength
    off_policy: OffPolicy | None
    thinking: Thinking | None

    after: ClassVar[tuple[str, ...]] = ("prompts",)
    version: ClassVar[int] = 1
    idle: ClassVar[tuple[str, ...]] = (  # drafters share the answers, whatever says how likely they are
        "target.tap_layers", "target.mask_token", "off_policy.engine")
    neutral: ClassVar[Mapping[str, Any]] = {"thinking": None}

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def preflight(self) -> None:
        self.target.require_length(self.max_length, "responses.max_length")
        if self.off_policy:
            self.off_policy.engine.preflight()
        if self.thinking:
            self.thinking.require_read(Chat.of(self.target))

    def foresee(self, inputs: dict[str, Path]) -> None:
        if "prompts" in inputs:
            self._require_answers(inputs["prompts"])

    def _require_answers(self, folder: Path) -> int:
        """How many prompts there are; raises unless each of their turns has an answer."""
        count, some, lacking = 0, False, ""
        for prompt, _ in iterate_prompts(folder):
            count += 1
            some = some or any(answer.strip() for answer in prompt.answers) or \
                any(message.get("tool_calls") for message in prompt.messages)
            if len(prompt.answers) < len(prompt.turns):
                lacking = lacking or (f"prompt {prompt.id} has {len(prompt.turns)} turns but "
                                      f"{len(prompt.answers)} answers")
        if some and lacking:
            raise UserError(f"{lacking}; responses=as_given needs an answer to each, or use "
                            "responses=regenerate")
        if not some:
            raise UserError(f"the {count} prompts bring no answer that is not empty; "
                            'responses=as_given needs "answers" or assistant messages, responses=regenerate '
                            "has the target answer")
        return count

    def longest(self, prompts: Sequence[Placed]) -> list[Length]:
        """The given answers, exactly, and those too that are too long."""
        chat = Chat.of(self.target)
        return [Length(f"{prompt.id}#{number}", len(ids), sum(mask)) for prompt, _ in prompts
                for number, (ids, mask) in enumerate(chat.given(prompt))]

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        count, chat = self._require_answers(inputs["prompts"]), Chat.of(self.target)
        rows = InOrder(out / RESPONSES)
        tally = Tally.of(read_rows(out))
        with Progress("tokenise", total=count, unit="conversations", start=rows.done) as bar, rows:
            for prompt, name in islice(iterate_prompts(inputs["prompts"]), rows.done, None):
                kept, long = self._rows(chat, prompt, name)
                rows.add(kept, [prompt.id] * long)
                for row in kept:
                    tally.add(row)
                bar.advance(1)
        if not tally.rows:
            raise UserError(f"all {len(rows.dropped)} conversations are longer than responses.max_length="
                            f"{self.max_length}; raise target.max_length, which sets it")
        score = self.off_policy.measure(read_rows(out), self.target) if self.off_policy else None
        report.write(out, inputs["prompts"], tally, {TOO_LONG: rows.dropped}, self.target, off_policy=score)
        record = describe(tally, self.target, rows.dropped)
        rows.forget()
        return {**record, "off_policy": score}

    def _rows(self, chat: Chat, prompt: Prompt, split: str) -> tuple[list[Row], int]:
        """Those of a conversation, and how many are too long."""
        found = [{"id": f"{prompt.id}#{number}", "split": split, "category": prompt.category,
                  "language": prompt.language, "thinking": mode_of({**chat.template, **prompt.template}),
                  "prompt": [], "tokens": ids, "mask": mask, "finish_reason": "given"}
                 for number, (ids, mask) in enumerate(chat.given(prompt))]
        kept = [row for row in found if len(row["tokens"]) <= self.max_length]
        return kept, len(found) - len(kept)


class InOrder:
    """A file of rows of one conversation after the other. Beside it stands how far it is whole: so many
    conversations, bytes, and the ids of those that were dropped."""

    def __init__(self, path: Path) -> None:
        self.path, self.beside = path, path.with_name(f"{path.name}.done")
        found = _facts(self.beside)
        path.touch()
        if path.stat().st_size < found["bytes"]:
            found = NOTHING
        self._dropped = [*found["dropped"]]
        self._whole = found["done"], found["bytes"], len(self._dropped)
        os.truncate(path, found["bytes"])

    @property
    def done(self) -> int:
        return self._whole[0]

    @property
    def dropped(self) -> list[str]:
        return self._dropped[:self._whole[2]]

    def __enter__(self) -> InOrder:
        self.file = self.path.open("ab")
        return self

    def __exit__(self, *details: object) -> None:
        self._commit()
        self.file.close()

    def add(self, rows: Sequence[Row], dropped: Sequence[str]) -> None:
        """Those of the next conversation, which is whole once all of it is here."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.file.write(data)
        self._dropped += dropped
        self._whole = self._whole[0] + 1, self._whole[1] + len(data), len(self._dropped)
        if self.done % COMMIT == 0:
            self._commit()

    def forget(self) -> None:
        """Leaves the file alone, when all that is made of it is there."""
        self.beside.unlink()

    def _commit(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        facts = {"done": self._whole[0], "bytes": self._whole[1], "dropped": self.dropped}
        partial = self.beside.with_name(f"{self.beside.name}.partial")
        partial.write_text(json.dumps(facts))
        partial.replace(self.beside)


def _facts(path: Path) -> dict[str, Any]:
    """What stands there; nothing where it cannot be read, and all is made again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return NOTHING
    return found if isinstance(found, dict) and found.keys() == NOTHING.keys() else NOTHING
