"""What a target said, as the message that comes back to its server in the next request: reasoning, text and
calls.

How it writes them is read off its own chat template, which is shown an answer of words that no template has:
what it puts around them are the marks. There is no table of model families. Gives up: calls whose arguments a
template does not write out, and those that its template would write with other marks than the target did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Self

from trainer.data.chat import Chat, Message
from trainer.data.messages import REASONING
from trainer.errors import UserError

THOUGHT, WORDS = "Qxreasoning", "Qxanswer"
NAMES = ("qx_first", "qx_second")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"qx_one": "Qxvalue", "qx_two": "Qxother"}, {"qx_three": "Qxlast"})
BLANKS = re.compile(r"\s*")
IDS = ("functions.{name}:{number}", "qxcall{number:03d}")  # of calls; some templates write or measure them


@dataclass(frozen=True)
class Calls:
    """How calls are written. `section` stands once before all of them, `opening` before each name, `middle`
    before the arguments: an object in JSON or, where there are `marks`, each argument between them: before
    its name, before its value, behind that."""

    section: str
    opening: re.Pattern[str]
    marks: tuple[str, str, str] | None

    @classmethod
    def of(cls, chat: Chat) -> Self | None:
        """Those of a template; None where they cannot be read off it."""
        said = next((text for count in (2, 1) for form in IDS if (text := _probe(chat, count, form))), None)
        if said is None:
            return None
        begin = said.index(NAMES[0])
        behind, second = begin + len(NAMES[0]), said.find(NAMES[1])
        found = _object(said, ARGUMENTS[0])
        start, end = found or (said.find("qx_one"), said.find("Qxother") + len("Qxother"))
        if start < behind or end < start:
            return None
        head = said[:begin]
        opening = _suffix(head, said[end:second]) if second > end else head
        if not opening.strip():
            return None
        marks, middle = None, said[behind:start]
        if not found:
            named, value, gap = (said[start + len("qx_one"):said.find("Qxvalue")], said.find("Qxvalue"),
                                 said[said.find("Qxvalue") + len("Qxvalue"):said.find("qx_two")])
            before = _suffix(middle, gap)
            if value < 0 or not before or not named:
                return None
            marks, middle = (before, named, gap[:len(gap) - len(before)]), middle[:len(middle) - len(before)]
        name = r"(?P<name>[^\s\"'<>{}()\[\],:=]+)"
        return cls(head[:len(head) - len(opening)],
                   re.compile(_loose(opening) + name + re.sub(r"\d+", r"\\d+", _loose(middle))), marks)

    def split(self, text: str) -> tuple[str, list[Message]]:
        """The text before the first call, and the calls; none where one of them does not end."""
        calls: list[Message] = []
        first, place = len(text), 0
        while (found := self.opening.search(text, place)) is not None:
            read = self._arguments(text, found.end())
            if read is None:
                return text, []
            arguments, place = read
            first = min(first, found.start())
            calls.append({"type": "function",
                          "function": {"name": found["name"], "arguments": arguments}})
        before = text[:first].rstrip()
        return (before.removesuffix(self.section.strip()).rstrip() if calls else text), calls

    def _arguments(self, text: str, place: int) -> tuple[dict[str, Any], int] | None:
        """The arguments that begin at a place, and where they end."""
        if self.marks is None:
            try:
                value, end = json.JSONDecoder().raw_decode(text, BLANKS.match(text, place).end())
            except (ValueError, RecursionError):
                return None
            return (value, end) if isinstance(value, dict) else None
        one = re.compile("{}(.+?){}(.*?){}".format(*map(re.escape, self.marks)), re.DOTALL)
        found: dict[str, Any] = {}
        while (each := one.match(text, place)) is not None:
            found[each[1]], place = each[2], each.end()
        return found, place


@dataclass(frozen=True)
class Speech:
    """How answers are written: `thought` are the marks before and behind reasoning, `openings` what may stand
    before the text itself, `special` the tokens that are no part of a text."""

    chat: Chat
    special: re.Pattern[str]
    thought: tuple[str, str] | None
    openings: tuple[str, ...]
    calls: Calls | None

    @classmethod
    def of(cls, chat: Chat) -> Self:
        """As the template has it with its arguments; calls are read only where there are tools, as a server
        does."""
        calls, special = Calls.of(chat) if chat.template.get("tools") else None, _special(chat.tokenizer)
        plain = _said(chat, {"content": WORDS}) or ""
        openings = [plain.partition(WORDS)[0].strip()] if WORDS in plain else []
        whole = _said(chat, {"content": WORDS, **dict.fromkeys(REASONING, THOUGHT)}) or ""
        before, found, rest = whole.partition(THOUGHT)
        behind = rest.partition(WORDS)[0]
        if not found or WORDS not in rest or not behind.strip():
            return cls(chat, special, None, tuple(filter(None, openings)), calls)
        calling = _probe(chat, 1, IDS[0], reasoning=True) if calls else None
        if calling and THOUGHT in calling:
            shared = commonprefix([behind, calling.partition(THOUGHT)[2]])
            if shared.strip():
                openings.insert(0, behind[len(shared):].strip())
                behind = shared
        return cls(chat, special, (before.strip(), behind.strip()), tuple(filter(None, openings)), calls)

    def message(self, tokens: Sequence[int]) -> Message:
        """Of the ids that the target sampled, with the end or without."""
        ids = list(tokens[:-1]) if tokens and tokens[-1] in self.chat.end_ids else list(tokens)
        text = whole = self._decoded(ids, skip=False)
        reasoning = ""
        if self.thought and self.thought[1] in text:
            reasoning, _, text = text.partition(self.thought[1])
            reasoning = reasoning.lstrip().removeprefix(self.thought[0]).strip("\n")
            text = text.lstrip("\n")
        for opening in self.openings:
            text = text.removeprefix(opening)
        content, calls = self.calls.split(text) if self.calls else (text, [])
        if content == whole:
            return {"role": "assistant", "content": self._decoded(ids, skip=True)}
        found: Message = {"role": "assistant", "content": self._plain(content)}
        if reasoning:
            found |= dict.fromkeys(REASONING, self._plain(reasoning))
        return {**found, "tool_calls": calls} if calls else found

    def _decoded(self, ids: list[int], skip: bool) -> str:
        return str(self.chat.tokenizer.decode(ids, skip_special_tokens=skip,
                                              clean_up_tokenization_spaces=False))

    def _plain(self, text: str) -> str:
        """Without special tokens, as a server hands texts out."""
        return self.special.sub("", text)


def _special(tokenizer: Any) -> re.Pattern[str]:
    """What decoding leaves out when it is told to leave out special tokens."""
    added = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    return re.compile("|".join(map(re.escape, {*added, *tokenizer.all_special_tokens})) or "(?!)")


def _said(chat: Chat, message: Message) -> str | None:
    """What a template writes for an answer behind its generation prompt, up to the end of the turn; None
    where it cannot, or writes something else than it asks for."""
    asked = {"role": "user", "content": "Qxquestion"}
    try:
        before = chat.text([asked], generate=True)
        whole = chat.text([asked, {"role": "assistant", **message}], generate=False)
    except UserError:
        return None
    if not whole.startswith(before):
        return None
    said = whole[len(before):]
    ends = [said.find(end) for end in chat.tokenizer.convert_ids_to_tokens(list(chat.end_ids)) if end in said]
    return said[:min(ends)] if ends else said


def _probe(chat: Chat, count: int, form: str, reasoning: bool = False) -> str | None:
    calls = [{"id": form.format(name=name, number=number), "type": "function",
              "function": {"name": name, "arguments": arguments}}
             for number, (name, arguments) in enumerate(zip(NAMES[:count], ARGUMENTS, strict=False))]
    thought = dict.fromkeys(REASONING, THOUGHT) if reasoning else {}
    said = _said(chat, {"content": "", "tool_calls": calls, **thought})
    return said if said and all(name in said for name in NAMES[:count]) and "Qxother" in said else None


def _object(text: str, wanted: dict[str, Any]) -> tuple[int, int] | None:
    """Where the object stands in a text as JSON."""
    for place in _places(text, "{"):
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError:
            continue
        if value == wanted:
            return place, end
    return None


def _places(text: str, what: str) -> Iterator[int]:
    place = text.find(what)
    while place >= 0:
        yield place
        place = text.find(what, place + 1)


def _suffix(one: str, other: str) -> str:
    """The longest end of both."""
    return commonprefix([one[::-1], other[::-1]])[::-1]


def _loose(text: str) -> str:
    """A pattern of the text, whatever blanks stand between its words."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))
