"""The language of prompts that do not say it, found by their text.

A naive Bayes classifier over pieces of bytes (py3langid: 139 languages, its model inside the package, nothing
but numpy), so that the same text gives the same language everywhere. A short text, or code alone, gives no
language away: what is not likely enough stays unknown, and is told so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

from trainer.data.prompt_rows import Row
from trainer.errors import UserError
from trainer.progress import Progress
from trainer.ranges import Share
from trainer.records import UNKNOWN, Prompt

MANY = 1000  # prompts from which on it takes long enough to be watched
LONGEST = 1000  # characters that are looked at
PACKAGE = "py3langid"
NONE = "zxx"  # what it calls a text that is of no language
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+", re.DOTALL)  # of no language


@dataclass(frozen=True)
class Detection:
    """A language is taken that is at least so likely."""

    confidence: Share

    def require(self) -> None:
        """Raises UserError unless the package is here."""
        if find_spec(PACKAGE) is None:
            raise UserError(f"prompts.languages finds the language of prompts with {PACKAGE}, which is not "
                            f"installed; install it (pip install {PACKAGE}), or set prompts.languages=null")

    def tagged(self, rows: list[Row]) -> list[Row]:
        """The rows, those of unknown language with the one that was found."""
        silent, found = sum(prompt.language == UNKNOWN for prompt, _ in rows), []
        with Progress("languages", total=silent if silent >= MANY else 0, unit="prompts") as bar:
            for prompt, split in rows:
                if prompt.language == UNKNOWN:
                    prompt = replace(prompt, language=self.of(prompt))
                    bar.advance(1)
                found.append((prompt, split))
        return found

    def of(self, prompt: Prompt) -> str:
        text = CODE.sub(" ", "\n".join(prompt.turns))[:LONGEST]
        found, share = _classifier().classify(text)
        told = share >= self.confidence and found != NONE and any(map(str.isalpha, text))
        return str(found) if told else UNKNOWN


@cache
def _classifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
