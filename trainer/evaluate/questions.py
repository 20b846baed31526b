"""What is asked of servers: prompts of the target, with room for an answer, that were not trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.architectures.base import Drafter
from trainer.data.chat import Chat
from trainer.data.response_rows import mask_of, read_rows, read_samples
from trainer.data.slices import Slices, of_prompt
from trainer.data.splits import spread
from trainer.errors import UserError
from trainer.export.formats import FORMATS
from trainer.records import Prompt


@dataclass(frozen=True)
class Question:
    """What a server is given, `ids`, and the slices of the traffic in which it lies."""

    id: str
    ids: list[int]
    slices: Slices


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


def unready(reader: str, form: str, stages: Mapping[str, Any], otherwise: str | None,
            kind: type[Drafter] | None) -> dict[str, str]:
    """By key what keeps the stage `reader` from measuring the exported format `form` on held-out prompts;
    `otherwise` is what else to do where none are held out, null where that does not matter. `kind` is the
    drafter that a server is to load in this format, null where none is started."""
    problems, formats = {}, stages["export"].formats
    if form not in formats:
        problems[f"{reader}.format"] = f"must be one of export.formats ({', '.join(formats)}), but is {form}"
    elif kind is not None and not FORMATS[form].loaded:
        loaded = [name for name in kind.formats if FORMATS[name].loaded]
        missing = [] if {*loaded} & {*formats} else [f"export.formats=[{','.join([*loaded[:1], *formats])}]"]
        problems[f"{reader}.format"] = (
            f"must be a format that a server loads ({', '.join(loaded)}), but is {form}, "
            f"{FORMATS[form].use}; set {' '.join([*missing, f'{reader}.format={loaded[0]}'])}")
    if otherwise and stages["prompts"].heldout == 0:
        problems["prompts.heldout"] = (f"must be at least 1, since {reader} measures on held-out prompts, "
                                       f"but is 0; or {otherwise}")
    return problems


def asked(chat: Chat, prompts: Iterable[Prompt]) -> list[Question]:
    """The first turn of each."""
    found = []
    for prompt in prompts:
        ids = chat.asked(prompt, [])
        found.append(Question(prompt.id, ids, of_prompt(prompt, chat.template, 0, len(ids))))
    return found


def later_turns(first: list[Question], prompts: Iterable[Prompt], chat: Chat, folder: Path,
                room: Room) -> tuple[list[Question], list[str]]:
    """The further turns of these conversations, behind the answers that they have in the finished stage
    `responses` in `folder`; and the ids of those that leave no room. A conversation of another one's id, as
    stored answers may have, is left alone."""
    asked_of, known = {each.id: each for each in first}, {prompt.id: prompt for prompt in prompts}
    rows = sorted((row for row in read_rows(folder) if row["split"] == "heldout"
                   and row["id"].rpartition("#")[0] in asked_of), key=lambda row: row["id"])
    found: dict[str, Question] = {}
    same: set[str] = set()
    for row in rows:
        name, _, number = row["id"].rpartition("#")
        ids, mask, begun = row["prompt"] + row["tokens"], mask_of(row), asked_of[name].ids
        if ids[:len(begun)] == begun and number == "0":
            same.add(name)
        starts = [place for place, said in enumerate(mask) if said and not (place and mask[place - 1])]
        for turn, start in enumerate(starts, int(number)):
            if turn and name in same:
                place = of_prompt(known[name], chat.template, turn, start)
                found[f"{name}#{turn}"] = Question(f"{name}#{turn}", ids[:start], place)
    long = [each.id for each in found.values() if len(each.ids) + room.answer > room.limit]
    return [each for each in found.values() if each.id not in long], long


def choose(found: list[Question], count: int, trained: list[str],
           room: Room) -> tuple[list[Question], list[str]]:
    """At most `count` questions, evenly over their categories, without those of the ids `trained`; and the
    ids of those that are left out as too long. Raises UserError for one that is too long and stays."""
    long = {each.id: len(each.ids) for each in found if len(each.ids) + room.answer > room.limit}
    dropped = [] if room.too_long == "error" else list(long)
    kept = [question for question in found if question.id not in {*dropped, *trained}]
    chosen = spread(kept, count, lambda question: question.slices["category"])
    for name in [each.id for each in chosen or [each for each in found if each.id not in trained]]:
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
    return [each.id for each in found
            if any(list(sample.tokens[:len(each.ids)]) == list(each.ids) for sample in samples)]
