"""One row of a source of conversations -> a `Prompt`; what is none is refused with the place of the row."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from trainer.data import messages
from trainer.data.row_forms import plain
from trainer.errors import UserError
from trainer.records import UNKNOWN, Prompt

Row = tuple[Prompt, str | None]  # a prompt and, where the source says so, its split
KEYS = ("id", "turns", "messages", "conversations", "request", "response", "system", "answers", "tools",
        "chat_template_kwargs", "category", "language", "split")

LONGEST = 8 << 20  # bytes of a line; a text of a million tokens has half of it


def parse_all(values: Iterable[tuple[str, int, Any]], bad: list[str],
              load: Callable[[Any, str], Any] = lambda value, where: value) -> list[Row]:
    """Rows of (place, number, value), which `load` makes an object. What is none is left out, and said in
    `bad`; so is a repeated id: it would make two rows one in every later stage. Keys that nothing reads are
    told."""
    rows: list[Row] = []
    places: dict[str, str] = {}
    unread: Counter[str] = Counter()
    for where, number, value in values:
        try:
            row = plain(load(value, where), where)
            parsed = parse_object(row, where, number)
            name = parsed[0].id
            if name in places:
                raise UserError(f"{where}: the id {name!r} is that of {places[name]} already; ids must be "
                                "unique, rename one of them")
        except UserError as error:
            bad.append(str(error))
            continue
        rows.append(parsed)
        unread.update(_unread(row))
        places[name] = where
    if unread:
        named = ", ".join(f"{reprlib.repr(name)} in {count}" for name, count in unread.most_common(5))
        print(f"prompts: of the {len(rows)} rows some have keys that nothing reads: {named}"
              f"{', ...' if len(unread) > 5 else ''}; a row has {', '.join(KEYS)}", flush=True)
    return rows


def require_few(bad: list[str], good: int, share: float) -> None:
    """Raises UserError when more than `share` of all rows are `bad`."""
    total = len(bad) + good
    if len(bad) > share * total:
        others = f"; {len(bad) - 1} more of the {total} rows are bad as well" if len(bad) > 1 else ""
        allowed = f" (prompts.max_bad_share={share:g} allows for {int(share * total)})" if share else ""
        raise UserError(f"{bad[0]}{others}{allowed}")


def parse_line(line: bytes, where: str) -> Any:
    """The object of a JSONL line."""
    if len(line) > LONGEST:
        raise UserError(f"{where}: has {len(line):,} bytes, more than any target reads ({LONGEST:,}); cut "
                        "it, or write one conversation a line")
    try:
        return json.loads(line.decode(), object_pairs_hook=lambda pairs: _once(pairs, where))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is no UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
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
    inside = messages.unread(row.get("messages") or [])
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
    system, turns, answers, whole = messages.conversation(row["messages"], where) if "messages" in row else \
        (row.get("system"), row.get("turns"), row.get("answers", []), ())
    if not _are_texts(turns) or not turns or not (whole or all(turn.strip() for turn in turns)):
        raise UserError(f'{where}: "turns" must be a list of texts that are not empty, found '
                        f'{reprlib.repr(turns)}')
    if not _are_texts(answers) or len(answers) > len(turns):
        raise UserError(f'{where}: "answers" must be a list of texts, at most one for each of the '
                        f'{len(turns)} turns, found {reprlib.repr(answers)}')
    prompt = Prompt(str(key), tuple(turns), system, row.get("category", "chat"),
                    row.get("language") or UNKNOWN, tuple(answers), whole, _template(row, where))
    _require_text(prompt, where)
    return prompt, name


def _template(row: dict[str, Any], where: str) -> dict[str, Any]:
    """What the chat template is given for this row, beside the target's own arguments."""
    found = row.get("chat_template_kwargs", {})
    if not isinstance(found, dict):
        raise UserError(f'{where}: "chat_template_kwargs" must be an object, found {reprlib.repr(found)}')
    return {**found, "tools": messages.tools(row["tools"], where)} if row.get("tools") else found


def _require_text(prompt: Prompt, where: str) -> None:
    beside = json.dumps([prompt.messages, prompt.template], ensure_ascii=False).replace("\\u0000", "\0")
    whole = "\n".join([prompt.id, prompt.system or "", prompt.category, prompt.language, *prompt.turns,
                       *prompt.answers, beside])
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds {error.object[error.start]!r}, half of a surrogate pair, which is "
                        "no text; write the whole character") from error
    if "\0" in whole:
        raise UserError(f"{where}: holds a NUL character, which is no text; take it out")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
