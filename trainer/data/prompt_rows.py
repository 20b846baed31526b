"""One row of a source of conversations -> a `Prompt`; what is none is refused with the place of the row."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from trainer.errors import UserError
from trainer.records import Prompt

Row = tuple[Prompt, str | None]  # a prompt and, where the source says so, its split
KEYS = ("id", "turns", "messages", "system", "answers", "category", "language", "split")


def parse_all(values: Iterable[tuple[int, Any]], place: str,
              load: Callable[[Any, str], Any] = lambda value, where: value) -> list[Row]:
    """Rows of (number, value), which `load` makes an object. Refuses a repeated id: it would make two rows
    one in every later stage. Keys that nothing reads are told."""
    rows: list[Row] = []
    places: dict[str, str] = {}
    unread: Counter[str] = Counter()
    for number, value in values:
        where = f"{place} {number}"
        row = load(value, where)
        rows.append(parse_object(row, where, number))
        unread.update(_unread(row))
        name = rows[-1][0].id
        if name in places:
            raise UserError(f"{where}: the id {name!r} is that of {places[name]} already; ids must be "
                            "unique, rename one of them")
        places[name] = where
    if unread:
        named = ", ".join(f"{reprlib.repr(name)} in {count}" for name, count in unread.most_common(5))
        print(f"prompts: of the {len(rows)} rows some have keys that nothing reads: {named}"
              f"{', ...' if len(unread) > 5 else ''}; a row has {', '.join(KEYS)}", flush=True)
    return rows


def parse_line(line: str, where: str) -> Any:
    """The object of a JSONL line."""
    try:
        return json.loads(line, object_pairs_hook=lambda pairs: _once(pairs, where))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); write one JSON "
                        "object a line") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        fault = "lists nested too deeply" if isinstance(error, RecursionError) else "a number too long"
        raise UserError(f"{where}: holds {fault} to be read; write one JSON object of texts a "
                        "line") from error


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise UserError(f"{where}: the key {reprlib.repr(twice)} stands twice in one object; keep one of "
                        "the two")
    return found


def _unread(row: dict[str, Any]) -> set[str]:
    """The keys of a row that was parsed which mean nothing here."""
    inside = {f"messages.{name}" for message in row.get("messages") or () for name, value in message.items()
              if value is not None and name not in ("role", "content")}
    return inside | {name for name, value in row.items() if value is not None and name not in KEYS}


def parse_object(row: Any, where: str, number: int) -> Row:
    """One row to a prompt, where null means absent; raises with `where` what a prompt cannot be made of."""
    if not isinstance(row, dict) or not ("turns" in row or "messages" in row):
        raise UserError(f'{where}: expected an object with "turns" or "messages", found {reprlib.repr(row)}')
    row = {key: value for key, value in row.items() if value is not None}
    for key in ("turns", "system", "answers"):
        if "messages" in row and key in row:
            raise UserError(f'{where}: "{key}" stands beside "messages", which say the same; leave one out')
    for key in ("system", "category", "language"):
        if not isinstance(row.get(key, ""), str):
            raise UserError(f'{where}: "{key}" must be a text, found {reprlib.repr(row[key])}')
    name, key = row.get("split"), row.get("id", f"row-{number}")
    if name not in (None, "train", "heldout"):
        raise UserError(f'{where}: "split" must be "train" or "heldout", found {reprlib.repr(name)}')
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise UserError(f'{where}: "id" must be a text or a whole number, found {reprlib.repr(key)}')
    system, turns, answers = _from_messages(row["messages"], where) if "messages" in row else \
        (row.get("system"), row.get("turns"), row.get("answers", []))
    if not _are_texts(turns) or not turns or not all(turn.strip() for turn in turns):
        raise UserError(f'{where}: "turns" must be a list of texts that are not empty, found '
                        f'{reprlib.repr(turns)}')
    if not _are_texts(answers) or len(answers) > len(turns):
        raise UserError(f'{where}: "answers" must be a list of texts, at most one for each of the '
                        f'{len(turns)} turns, found {reprlib.repr(answers)}')
    prompt = Prompt(str(key), tuple(turns), system, row.get("category", "chat"), row.get("language", "en"),
                    tuple(answers))
    _require_text(prompt, where)
    return prompt, name


def _require_text(prompt: Prompt, where: str) -> None:
    try:
        "\0".join([prompt.id, prompt.system or "", prompt.category, prompt.language, *prompt.turns,
                   *prompt.answers]).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds {error.object[error.start]!r}, half of a surrogate pair, which is "
                        "no text; write the whole character") from error


def _from_messages(messages: Any, where: str) -> tuple[str | None, list[str], list[str]]:
    """OpenAI messages -> system text, user turns, given answers. User and assistant alternate."""
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and _are_texts([m.get("role"), m.get("content")]) for m in messages):
        raise UserError(f'{where}: "messages" must be a list of objects with "role" and a text "content"')
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    rest = messages[1:] if system is not None else messages
    for index, message in enumerate(rest):
        expected = "assistant" if index % 2 else "user"
        if message["role"] != expected:
            raise UserError(f'{where}: message {index + 1} has role {message["role"]!r}, expected '
                            f"{expected!r}; user and assistant must alternate")
    return system, [m["content"] for m in rest[::2]], [m["content"] for m in rest[1::2]]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
