"""Which conversations are to think: an argument of the chat template, given to a share of them.

Decided by the seed and the id of a prompt alone, so that adding rows moves no other, and kept with the
prompt, so that answers, training and evaluation ask it in the same mode.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from trainer.data.chat import Chat
from trainer.data.slices import EFFORT, SWITCHES, thinking
from trainer.errors import UserError
from trainer.ranges import Seed, Share
from trainer.records import Prompt


@dataclass(frozen=True)
class Thinking:
    """The `share` of prompts thinks: 1 all, 0 none. `argument` is what the chat template calls it.
    A row that says its own mode keeps it."""

    share: Share
    argument: Literal["enable_thinking", "thinking"]
    seed: Seed

    def told(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        return [self.of(prompt) for prompt in prompts]

    def of(self, prompt: Prompt) -> Prompt:
        if any(name in prompt.template for name in (EFFORT, *SWITCHES)):
            return prompt
        return replace(prompt, template={**prompt.template, self.argument: self._thinks(prompt.id)})

    def require_read(self, chat: Chat) -> None:
        """Raises UserError where the chat template writes the same for both modes."""
        asked = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."},
                 {"role": "user", "content": "And?"}]
        found = {replace(chat, template={**chat.template, self.argument: value}).text(asked, generate=True)
                 for value in (True, False)}
        if len(found) == 1:
            raise UserError(f"prompts.thinking.argument={self.argument} changes nothing in what the chat "
                            f"template of {chat.tokenizer.name_or_path} asks; name the argument that it "
                            "reads, or set prompts.thinking=null")

    def _thinks(self, name: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}:thinking:{name}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.share * 2 ** 64


def modes(prompts: Iterable[Prompt]) -> dict[str, int]:
    """How many are told which mode."""
    return dict(Counter(thinking(prompt.template) for prompt in prompts))
