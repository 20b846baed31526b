"""What is asked of servers: prompts of the target, with room for an answer, that were not trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.data.chat import Chat
from trainer.data.response_rows import read_samples
from trainer.data.splits import spread
from trainer.errors import UserError
from trainer.records import Prompt

Question = tuple[str, str, list[int]]  # id, category, prompt ids


@dataclass(frozen=True)
class Room:
    """`limit` tokens, by the setting `key`, hold a prompt and an answer of `answer` tokens; what happens to a
    prompt that leaves none says `too_long`, a setting of the stage `reader`; `words` name the prompts."""

    reader: str
    words: str
    limit: int
    key: str
    setting: str  # that of `answer`
    answer: int
    too_long: Literal["error", "drop"]


def unready(reader: str, form: str, stages: Mapping[str, Any], otherwise: str | None) -> dict[str, str]:
    """By key what keeps the stage `reader` from measuring the exported format `form` on held-out prompts;
    `otherwise` is what else to do where none are held out, null where that does not matter."""
    problems, formats = {}, stages["export"].formats
    if form not in formats:
        problems[f"{reader}.format"] = f"must be one of export.formats ({', '.join(formats)}), but is {form}"
    if otherwise and stages["prompts"].heldout == 0:
        problems["prompts.heldout"] = (f"must be at least 1, since {reader} measures on held-out prompts, "
                                       f"but is 0; or {otherwise}")
    return problems


def asked(chat: Chat, prompts: Iterable[Prompt]) -> list[Question]:
    """The first turn of each."""
    return [(prompt.id, prompt.category, chat.asked(prompt, [])) for prompt in prompts]


def choose(found: list[Question], count: int, trained: list[str],
           room: Room) -> tuple[list[Question], list[str]]:
    """At most `count` questions, evenly over their categories, without those of the ids `trained`; and the
    ids of those that are left out as too long. Raises UserError for one that is too long and stays."""
    long = {name: len(ids) for name, _, ids in found if len(ids) + room.answer > room.limit}
    dropped = [] if room.too_long == "error" else list(long)
    kept = [question for question in found if question[0] not in {*dropped, *trained}]
    chosen = spread(kept, count, lambda question: question[1])
    for name, _, _ in chosen or [each for each in found if each[0] not in trained]:
        if name in long:
            advice = "" if dropped else f"leave such prompts out with {room.reader}.too_long=drop, "
            raise UserError(f"{room.words} {name} has {long[name]} tokens, which leaves no room for "
                            f"an answer of {room.setting}={room.answer} within {room.key}={room.limit} "
                            f"({len(long)} of {len(found)} are so long); {advice}raise the one or lower the "
                            "other")
    return chosen, dropped


def exported(folder: Path) -> dict[str, Any]:
    """What the export says about its folders; raises when their target lies no more where they say."""
    facts = json.loads((folder / "export.json").read_text())
    if Path(facts["target"]).is_absolute() and not Path(facts["target"]).exists():
        raise UserError(f"{folder} names its target by the path {facts['target']}, where nothing is any "
                        "more; export again with export.target_name= its path now, or its name on the Hub")
    return facts


def trained_on(found: list[Question], inputs: dict[str, Path]) -> list[str]:
    """Ids of the prompts that begin a sample of training."""
    samples = read_samples(inputs["responses"], "train") if "responses" in inputs else []
    return [name for name, _, ids in found
            if any(list(sample.tokens[:len(ids)]) == list(ids) for sample in samples)]
