"""Which prompts are trained on and which are held out, and which texts stand there more than once.

What is held out is decided by the hash of a text, so that adding rows moves few others, and a text that is
held out is in no training prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.data.prompt_rows import Row
from trainer.records import Prompt

Item = TypeVar("Item")
Text = tuple[str, tuple[str, ...]]  # what is asked: system text and turns
CROWDED = "repeats a held-out text"


@dataclass(frozen=True)
class Dropped:
    """A prompt that is left out of training, why, and the one whose text decided it."""

    id: str
    why: str
    of: str


def split(rows: list[Row], heldout: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. A split that the source gives is kept (held-out cut to `heldout`), but
    for repeated texts: they are held out once, and then not trained on."""
    given = _different([prompt for prompt, name in rows if name == "heldout"])
    free = [prompt for prompt, name in rows if name != "heldout"]
    if len(given) >= heldout:
        chosen = in_turn(given, heldout, lambda prompt: (prompt.category, prompt.language))
    else:
        known = {text_of(prompt) for prompt in given}
        others = _different([prompt for prompt in free if text_of(prompt) not in known])
        picked = {prompt.id for prompt in sorted(others, key=_text_hash)[:heldout - len(given)]}
        chosen = given + [prompt for prompt in others if prompt.id in picked]
    texts = {text_of(prompt) for prompt in chosen}
    return [prompt for prompt in free if text_of(prompt) not in texts], chosen


def crowded_out(rows: list[Row], heldout: list[Prompt]) -> list[Dropped]:
    """Those of the rows to train on whose text is held out."""
    texts = {text_of(prompt): prompt.id for prompt in heldout}
    return [Dropped(prompt.id, CROWDED, texts[text_of(prompt)]) for prompt, name in rows
            if name != "heldout" and texts.get(text_of(prompt), prompt.id) != prompt.id]


def repeats(rows: list[Row], heldout: list[Prompt]) -> dict[str, Any]:
    """How many rows repeat the text of an earlier one, and which of them the held-out part crowds out."""
    groups: dict[Text, list[str]] = {}
    for prompt, _ in rows:
        groups.setdefault(text_of(prompt), []).append(prompt.id)
    repeated = [" = ".join(group[:4]) for group in groups.values() if len(group) > 1]
    out = [name for prompt in heldout for name in groups[text_of(prompt)] if name != prompt.id]
    count = len(rows) - len(groups)
    if count:
        more = "; ..." if len(repeated) > 5 else ""
        print(f"prompts: {count} rows repeat the text of an earlier one ({'; '.join(repeated[:5])}{more}); "
              f"{len(out)} are left out, as their text is held out", flush=True)
    return {"repeated": count, "left_out": len(out), "left_out_ids": out[:20]}


def _different(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first prompt of each text."""
    found: dict[Text, Prompt] = {}
    for prompt in prompts:
        found.setdefault(text_of(prompt), prompt)
    return list(found.values())


def text_of(prompt: Prompt) -> Text:
    """What tells two prompts apart: tools count as a part of the system text."""
    beside = json.dumps(prompt.template, sort_keys=True, ensure_ascii=False) if prompt.template else ""
    return (prompt.system or "") + beside, prompt.turns


def _text_hash(prompt: Prompt) -> str:
    system, turns = text_of(prompt)
    return hashlib.sha256("\n".join([system, *turns]).encode()).hexdigest()


def spread(items: Sequence[Item], count: int, category: Callable[[Item], str]) -> list[Item]:
    """At most `count` of the items, from every category in proportion and evenly within it."""
    ordered = sorted(items, key=category)
    count = min(count, len(ordered))
    return [ordered[number * len(ordered) // count] for number in range(count)]


def in_turn(items: Sequence[Item], count: int, group: Callable[[Item], Hashable]) -> list[Item]:
    """`count` of the items, taken in turn from their groups, so that few of them still have all; in the order
    of the items."""
    groups: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(group(item), []).append(number)
    chosen: list[int] = []
    for depth in range(max(map(len, groups.values()), default=0)):
        chosen += [numbers[depth] for numbers in groups.values() if depth < len(numbers)]
    return [items[number] for number in sorted(chosen[:count])]
