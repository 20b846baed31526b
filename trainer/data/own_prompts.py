"""Prompts that the target makes up itself: given what a chat begins with, it goes on as the user would.

Serving meets more prompts than any file holds, and a drafter trained on few of them learns them by heart.
What a chat model says in the user's place is close to what it was trained on and as varied as one likes
(Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainer.data.answering import Answering
from trainer.data.chat import Chat
from trainer.engines.base import TargetEngine
from trainer.errors import UserError
from trainer.progress import Progress
from trainer.ranges import Above, Amount, AtMost, Count
from trainer.records import Prompt, Sampling

OWN_PROMPTS = "own_prompts.jsonl"
CATEGORY = "own"


@dataclass(frozen=True)
class OwnPrompts:
    """How many `prompts` are drawn, of at most `max_new_tokens`, and how."""

    prompts: Amount
    max_new_tokens: Count
    temperature: Annotated[float, Above(0)]
    top_p: Annotated[float, Above(0), AtMost(1)]

    def ids(self) -> list[str]:
        return [f"{CATEGORY}-{number:06d}" for number in range(1, self.prompts + 1)]

    def longest(self, chat: Chat) -> int:
        """Tokens of the longest of them, as it is asked, generation prompt included."""
        return len(chat.prompt([{"role": "user", "content": ""}])) + self.max_new_tokens

    def require_room(self, chat: Chat, limit: int) -> None:
        """Raises UserError if one of them may leave no room for an answer within `limit` tokens."""
        if self.prompts and (longest := self.longest(chat)) >= limit:
            raise UserError(f"responses.own.max_new_tokens={self.max_new_tokens} gives prompts of up to "
                            f"{longest} tokens, which leave no room for an answer within "
                            f"target_engine.max_length={limit}; lower the one or raise the other")

    def require_free(self, known: Sequence[Prompt]) -> None:
        """Raises UserError if a prompt has the id of one of them."""
        if taken := {prompt.id for prompt in known} & set(self.ids()):
            raise UserError(f"prompt {min(taken)} has the id that responses.own.prompts gives to a prompt of "
                            "the target's own; rename it in the prompts")

    def draw(self, chat: Chat, engine: TargetEngine, seed: int, known: Sequence[Prompt],
             folder: Path) -> list[Prompt]:
        """The prompts, kept in `folder` group by group, so that a killed run goes on. Raises UserError when
        an id is taken or no prompt comes of it."""
        if not self.prompts:
            return []
        self.require_free(known)
        answering = Answering(engine, folder / OWN_PROMPTS)
        opening, names, longest = chat.opening(), self.ids(), self.longest(chat)
        sampling = Sampling(self.max_new_tokens, self.temperature, self.top_p, seed)
        openings = [{"id": name, "split": "train", "category": CATEGORY, "prompt": opening} for name in names]
        groups = [openings[start:start + engine.group] for start in range(0, len(names), engine.group)]
        with Progress("own prompts", total=len(names), unit="prompts", start=answering.count) as bar:
            answering.ask(groups, sampling, bar)
        answering.finish()
        seen = {" ".join(prompt.turns[0].split()) for prompt in known}
        found = []
        for row in answering.rows.values():
            text = chat.tokenizer.decode(row["tokens"], skip_special_tokens=True).strip()
            plain = " ".join(text.split())
            prompt = Prompt(row["id"], (text,), category=CATEGORY)
            fits = len(chat.asked(prompt, [])) <= longest  # its text may be cut otherwise again
            if row["finish_reason"] == "stop" and plain and plain not in seen and fits:
                seen.add(plain)
                found.append(prompt)
        if not found:
            raise UserError(f"none of the {self.prompts} prompts that the target made up ended within "
                            f"responses.own.max_new_tokens={self.max_new_tokens}: it does not speak for a "
                            "user; set responses.own.prompts=0")
        return found
