"""In which slices of the traffic a conversation lies, one of each kind: what a mean over all of them hides.

The thinking mode is what the chat template is told; whether an answer thinks is the target's business. A
context is measured by the tokens that stand before the answer, and told by the bucket that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.records import UNKNOWN, Prompt, Sample

Slices = Mapping[str, str]  # by kind
KINDS = ("category", "language", "thinking", "context", "turn")
SWITCHES = ("enable_thinking", "thinking")  # of chat templates
EFFORT = "reasoning_effort"  # of those that know more than on and off
BOUNDS = (128, 512, 2048, 8192, 32768, 131072)  # tokens of the buckets
BUCKETS = (*(f"up_to_{bound}" for bound in BOUNDS), f"over_{BOUNDS[-1]}")
TURNS = ("first", "second", "third", "later")


def of_prompt(prompt: Prompt, template: Mapping[str, Any], turn: int, tokens: int) -> Slices:
    """Those of the answer `turn`, 0 for the first, of a conversation of which `tokens` stand before it.
    `template` are the arguments of the target's chat template; the prompt's own come before them."""
    return _of(prompt.category, prompt.language, thinking({**template, **prompt.template}), tokens, turn)


def of_sample(sample: Sample) -> Slices:
    """Those of the first answer in a row of training data."""
    return _of(sample.category, sample.language, sample.thinking, sample.loss_mask.index(True), sample.turn)


def thinking(template: Mapping[str, Any]) -> str:
    """The thinking mode that these arguments of a chat template ask for; unknown where they leave it to the
    template."""
    found = next((template[name] for name in SWITCHES if isinstance(template.get(name), bool)), None)
    return str(template.get(EFFORT) or UNKNOWN) if found is None else "on" if found else "off"


def label(kind: str, name: str) -> str:
    """How a slice is called among others: a category by its name."""
    return name if kind == "category" else f"{kind}={name}"


def parsed(found: str) -> tuple[str, str]:
    """Kind and name of a slice that is called so."""
    kind, mark, name = found.partition("=")
    return (kind, name) if mark and kind in KINDS else ("category", found)


def differing(found: Iterable[Slices]) -> list[str]:
    """The kinds in which they do not all lie in one slice."""
    known = [*found]
    return [kind for kind in KINDS if len({each[kind] for each in known}) > 1]


def ordered(kind: str, names: Iterable[str]) -> list[str]:
    """Slices of one kind as people read them."""
    return sorted({*names}, key=lambda name: rank(label(kind, name)))


def rank(found: str) -> tuple[int, int, str]:
    """Where a slice that is called so stands among others: kind by kind, the shorter and earlier first, names
    by the alphabet."""
    kind, name = parsed(found)
    scale = {"context": BUCKETS, "turn": TURNS}.get(kind, ())
    return KINDS.index(kind), scale.index(name) if name in scale else 0, name


def _of(category: str, language: str, mode: str, tokens: int, turn: int) -> Slices:
    bucket = next((place for place, bound in enumerate(BOUNDS) if tokens <= bound), -1)
    return {"category": category, "language": language, "thinking": mode, "context": BUCKETS[bucket],
            "turn": TURNS[min(turn, len(TURNS) - 1)]}
