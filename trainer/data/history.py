"""What later turns of a conversation go on from: the target's own answers, as its server gets them back.

A tool's result in the data belongs to the call that the data has before it. It follows the target's own call,
where that is of the same functions; where it is not, `Unmatched` says what happens, and it is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.data.chat import Chat, Message
from trainer.data.response_rows import Row
from trainer.data.speech import Speech
from trainer.records import Prompt

Unmatched = Literal["recorded", "drop"]  # the data's own answer stands in its place, or nothing follows
LEFT_OUT = "turns behind calls that the data has no result of"
OUTCOMES = ("own", "other_arguments", "recorded", "dropped")


@dataclass
class History:
    """`outcomes` has, by turn, what became of those with calls: of the target, or of the data. `lost` turns
    come behind those that were dropped."""

    chat: Chat
    unmatched: Unmatched
    outcomes: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    _speech: dict[str, Speech] = field(default_factory=dict)

    def before(self, prompt: Prompt, answered: Sequence[Row]) -> list[Message] | None:
        """The answers to the first turns; None where nothing follows the last of them."""
        found = [self._message(prompt, turn, row) for turn, row in enumerate(answered)]
        return None if None in found else found

    def counts(self) -> dict[str, int]:
        """Turns with calls that went on, by what stands there: the target's own calls, with the arguments of
        the data's or with others; the data's answer; and those that ended there."""
        found = Counter(self.outcomes.values())
        return {name: found[name] for name in OUTCOMES}

    def dropped(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome == "dropped"]

    def _message(self, prompt: Prompt, turn: int, row: Row) -> Message | None:
        own, given = self._spoken(prompt).message(row["tokens"]), _given(prompt, turn)
        calls, wanted = own.get("tool_calls", []), (given or {}).get("tool_calls", [])
        if not calls and not wanted:
            return own
        if wanted and _names(calls) == _names(wanted):
            same = [each["function"] for each in calls] == [each["function"] for each in wanted]
            self.outcomes[f"{prompt.id}#{turn}"] = "own" if same else "other_arguments"
            ids = [{"id": each["id"]} if "id" in each else {} for each in wanted]
            return {**own, "tool_calls": [{**name, **call} for name, call in zip(ids, calls, strict=True)]}
        kept = given if self.unmatched == "recorded" else None
        name = f"{prompt.id}#{turn}"
        if not kept and name not in self.outcomes:
            self.lost += len(prompt.turns) - turn - 1
        self.outcomes[name] = "recorded" if kept else "dropped"
        return kept

    def _spoken(self, prompt: Prompt) -> Speech:
        key = json.dumps(prompt.template, sort_keys=True)
        if key not in self._speech:
            self._speech[key] = Speech.of(self.chat.of_prompt(prompt))
        return self._speech[key]


def _given(prompt: Prompt, turn: int) -> Message | None:
    """The answer that the data has there."""
    if prompt.messages:
        found = [message for message in prompt.messages if message["role"] == "assistant"]
        return found[turn] if turn < len(found) else None
    return {"role": "assistant", "content": prompt.answers[turn]} if turn < len(prompt.answers) else None


def _names(calls: Sequence[dict[str, Any]]) -> list[str]:
    return [each["function"]["name"] for each in calls]
