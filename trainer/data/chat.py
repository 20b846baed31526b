"""Chat template -> token ids and loss mask, from the tokenizer's own template and nothing else.

There is no table of model families. What the server would sample is found by rendering prefixes: the ids of
the conversation up to an assistant turn *with* the generation prompt are what the server is given, and
everything that the full rendering adds, up to and including the first end-of-turn id, is what it would
sample. Where the tokenizer would join the end of the generation prompt and the beginning of an answer into
one token, the answer is tokenised by itself: a server cannot take back what it was given. """

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rich.text import Text

from trainer.errors import UserError
from trainer.records import Prompt
from trainer.target import Target

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A tokenizer with a chat template. `template` holds keyword arguments of the template (thinking mode,
    tools); `end_ids` are the ids at which the server stops."""

    tokenizer: Any
    template: dict[str, Any]
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, target: Target) -> Self:
        return cls(target.tokenizer, target.template, target.end_ids)

    def of_prompt(self, prompt: Prompt) -> Self:
        """As it is for one conversation, which may bring tools or a thinking mode."""
        return replace(self, template={**self.template, **prompt.template}) if prompt.template else self

    def asked(self, prompt: Prompt, answers: Sequence[str | Message]) -> list[int]:
        """Ids that the server is given for the turn after these answers."""
        return self.of_prompt(prompt).prompt(messages_of(prompt, answers))

    def given(self, prompt: Prompt) -> list[tuple[list[int], list[bool]]]:
        """Rows (ids, loss mask) of a conversation with the answers that it brings."""
        messages = prompt.messages or messages_of(prompt, list(prompt.answers))
        return self.of_prompt(prompt).supervised(messages)

    def render(self, messages: Sequence[Message], generate: bool) -> list[int]:
        """Ids of the conversation; with `generate` the generation prompt is added, as the server does."""
        return list(self._applied(messages, generate, tokenize=True, return_dict=False))

    def text(self, messages: Sequence[Message], generate: bool) -> str:
        """What `render` tokenises."""
        return str(self._applied(messages, generate, tokenize=False))

    def _applied(self, messages: Sequence[Message], generate: bool, **how: Any) -> Any:
        import jinja2

        if not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer {self.tokenizer.name_or_path} has no chat template, so the "
                            "server could not be asked for a chat; add chat_template.jinja to the target's "
                            "folder")
        try:
            return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, **how,
                                                      **self.template)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError,
                AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(f"the chat template of {self.tokenizer.name_or_path} fails to render a "
                            f"conversation with roles [{roles}]: {error}; mend the template or the row "
                            "(target.template holds its arguments)") from error

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.render(messages, generate=True)

    def opening(self) -> list[int]:
        """Ids of what stands before the first words of a user."""
        words = "words-of-the-user"
        before, found, _ = self.text([{"role": "user", "content": words}], generate=False).partition(words)
        if not found or not before:
            raise UserError(f"the chat template of {self.tokenizer.name_or_path} writes nothing before a "
                            "user's words, so the target cannot be asked to speak for one; set "
                            "responses.own.prompts=0")
        return list(self.tokenizer(before, add_special_tokens=False).input_ids)

    def supervised(self, messages: Sequence[Message]) -> list[tuple[list[int], list[bool]]]:
        """Rows (ids, loss mask) of a conversation whose answers are given.

        One row when every prefix rendering is a prefix of the whole (then all assistant turns are supervised
        in it); else one row for each assistant turn, since templates may rewrite history (dropped reasoning,
        for example). """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError("the conversation has no assistant turn, so there is nothing to learn from it")
        whole = self.render(messages[:turns[-1] + 1], generate=False)
        mask = [False] * len(whole)
        rows = []
        stable = True
        for turn in turns:
            prefix = self.render(messages[:turn], generate=True)
            full = self._continued(messages[:turn + 1], prefix)
            end = self._end(full, len(prefix))
            rows.append((full[:end], [False] * len(prefix) + [True] * (end - len(prefix))))
            stable = stable and whole[:end] == full[:end]
            mask[len(prefix):end] = [True] * (end - len(prefix))
        if stable:
            end = len(mask) - mask[::-1].index(True)
            return [(whole[:end], mask[:end])]
        return rows

    def _continued(self, messages: Sequence[Message], prefix: list[int]) -> list[int]:
        """Ids of the conversation up to an answer, beginning with the ids that the server is given for it."""
        full = self.render(messages, generate=False)
        if full[:len(prefix)] == prefix:
            return full
        before, whole = self.text(messages[:-1], generate=True), self.text(messages, generate=False)
        if whole.startswith(before):
            found = prefix + list(self.tokenizer(whole[len(before):], add_special_tokens=False).input_ids)
            if self._plain(found) == self._plain(full):
                return found
        raise UserError("the chat template does not continue its own generation prompt at turn "
                        f"{len(messages)}: the server would be given "
                        f"{self.tokenizer.decode(prefix)[-60:]!r}, the rendered answer begins "
                        "differently; regenerate the answers with responses=regenerate")

    def _plain(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _end(self, ids: Sequence[int], start: int) -> int:
        """One past the first end-of-turn id after `start`; the row's end when the template writes none."""
        return next((index + 1 for index in range(start, len(ids)) if ids[index] in self.end_ids), len(ids))


def spans(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of the stretches of a row that are supervised, and of those that are not."""
    start = 0
    for index in range(1, len(mask) + 1):
        if index == len(mask) or mask[index] != mask[start]:
            yield start, index
            start = index


def coloured(tokenizer: Any, tokens: Sequence[int], mask: Sequence[bool]) -> Text:
    """The row as it is, what is supervised in green."""
    shown = Text()
    for start, end in spans(mask):
        shown.append(tokenizer.decode(list(tokens[start:end]), skip_special_tokens=False),
                     style="bold green" if mask[start] else "dim")
    return shown


def messages_of(prompt: Prompt, answers: Sequence[str | Message]) -> list[Message]:
    """The conversation up to the turn after the given answers (or to the end when all are given). Where an
    answer is a text, and that of the data has calls with results, the latter stays, since these belong to
    it."""
    if not prompt.messages:
        return _plain_messages(prompt, answers)
    found: list[Message] = []
    turn = 0
    for message, after in zip(prompt.messages, [*prompt.messages[1:], None], strict=True):
        if message["role"] != "assistant":
            found.append(message)
            continue
        if turn == len(answers):
            break
        kept = after is not None and after["role"] == "tool"
        found.append(message if kept and isinstance(answers[turn], str) else _answer(answers[turn]))
        turn += 1
    return found


def _answer(given: str | Message) -> Message:
    return {"role": "assistant", "content": given} if isinstance(given, str) else given


def _plain_messages(prompt: Prompt, answers: Sequence[str | Message]) -> list[Message]:
    messages = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    for index, turn in enumerate(prompt.turns[:len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        if index < len(answers):
            messages.append(_answer(answers[index]))
    return messages
