"""Whether the ids that are trained on are those that a real server makes of the same conversations.

    python tools/check_template.py [--rows N] [KEY=VALUE ...]

    python tools/check_template.py recipe=dflash_smollm2
    python tools/check_template.py recipe=dflash_qwen3_8b engine.url=http://host:8000 \\
        prompts=jsonl prompts.source.path=requests.jsonl

Takes the target, the prompts and the server (started, or joined by engine.url) from the settings, as a run
does. Of the first N rows each request of the conversation is rendered and tokenised here and by the server's
/tokenize: what it would be asked for the first answer, for each later one behind the answers that the row
brings, and the whole with the last of them. What differs is shown with the place where it begins. Then it is
told for how many of the rows with answers one mask holds for the whole, and how many need a row for each
answer. Exit status: 0 when all are equal, 1 when some differ, 2 with one sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx  # noqa: E402

from trainer._paths import find  # noqa: E402
from trainer.check import check  # noqa: E402
from trainer.compose import compose_configuration  # noqa: E402
from trainer.data.chat import Chat, messages_of  # noqa: E402
from trainer.errors import UserError  # noqa: E402
from trainer.pipeline import Stage, build  # noqa: E402
from trainer.progress import exit_status  # noqa: E402
from trainer.records import Prompt  # noqa: E402

AROUND = 8  # tokens shown on both sides of the first difference
SHOWN = 5  # differences


def requests_of(prompt: Prompt) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Messages of the conversation as far as each request goes, and whether an answer is asked for."""
    whole = list(prompt.messages) or messages_of(prompt, list(prompt.answers))
    for place, message in enumerate(whole):
        if message["role"] == "assistant":
            yield whole[:place], True
    answered = max((place for place, each in enumerate(whole) if each["role"] == "assistant"), default=-1)
    if answered < len(whole) - 1:
        yield whole, True
    if answered >= 0:
        yield whole[:answered + 1], False


def body(messages: Sequence[dict[str, Any]], generate: bool, template: dict[str, Any],
         name: str) -> dict[str, Any]:
    """What a client sends: reasoning under one name, the arguments of a call as JSON."""
    sent = []
    for message in messages:
        each = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "tool_calls" in each:
            each["tool_calls"] = [{"id": f"call-{number}", **call, "function": _as_json(call["function"])}
                                  for number, call in enumerate(each["tool_calls"])]
        sent.append(each)
    beside = {key: value for key, value in template.items() if key != "tools"}
    tools = {"tools": template["tools"]} if "tools" in template else {}
    return {"model": name, "messages": sent, "add_generation_prompt": generate,
            "chat_template_kwargs": beside, **tools}


def _as_json(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def served(client: httpx.Client, request: dict[str, Any]) -> list[int] | str:
    """The server's ids, or why it gives none."""
    try:
        answer = client.post("/tokenize", json=request)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:300]}"
        return list(answer.json()["tokens"])
    except (httpx.TransportError, ValueError, LookupError) as error:
        raise UserError(f"the server at {client.base_url} does not answer /tokenize ({error}); check that "
                        "vLLM itself listens at engine.url") from error


def difference(tokenizer: Any, here: Sequence[int], there: Sequence[int]) -> str:
    """Where two lists of ids part, and what stands there."""
    pairs = enumerate(zip(here, there, strict=False))
    place = next((number for number, (one, other) in pairs if one != other), min(len(here), len(there)))
    first = max(0, place - AROUND)
    parts = [tokenizer.decode(list(ids[first:place + AROUND])) for ids in (here, there)]
    return (f"token {place} of {len(here)} here and {len(there)} there: {list(here[place:place + 3])}, not "
            f"{list(there[place:place + 3])}; here {parts[0]!r}, there {parts[1]!r}")


def compare(chat: Chat, prompts: Sequence[Prompt], client: httpx.Client, name: str) -> tuple[int, list[str]]:
    """How many requests were compared, and what differs."""
    compared, found = 0, []
    for prompt in prompts:
        own = chat.of_prompt(prompt)
        for messages, generate in requests_of(prompt):
            here = own.render(messages, generate)
            there = served(client, body(messages, generate, own.template, name))
            compared += 1
            if here != there:
                reason = f"refused, {there}" if isinstance(there, str) else \
                    difference(chat.tokenizer, here, there)
                found.append(f"{prompt.id}, {len(messages)} messages: {reason}")
    return compared, found


def masks(chat: Chat, prompts: Sequence[Prompt]) -> Counter[str]:
    """What becomes of the answers that rows bring."""
    kinds: Counter[str] = Counter()
    for prompt in prompts:
        if not prompt.answers:
            continue
        try:
            rows = len(chat.given(prompt))
        except UserError as error:
            kinds[f"cannot be supervised ({error})"] += 1
            continue
        kinds["have one mask" if rows == 1 else "need a row for each answer"] += 1
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200, metavar="N", help="so many rows (200)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, as of a run")
    options = parser.parse_args()
    configuration, choices = compose_configuration(options.settings, find()), find()
    if problems := check(configuration, choices.groups(), Stage):
        raise UserError("\nerror: ".join(problems))
    settings = configuration.settings
    target, stage, server = (build(settings[name], name) for name in ("target", "prompts", "engine"))
    bad: list[str] = []
    prompts = [prompt for prompt, _ in stage.source.rows(bad)][:options.rows]
    if not prompts:
        raise UserError("there is no row to compare; name prompts with some, and --rows of at least 1")
    chat = Chat.of(target)
    with tempfile.TemporaryDirectory() as folder, \
            server.serve(target.folder, Path(folder, "server.log")) as running, \
            httpx.Client(**running.client.options) as client:
        compared, found = compare(chat, prompts, client, running.served_name)
        print(f"{target.name} on vLLM {running.version}: {compared - len(found)} of {compared} requests of "
              f"{len(prompts)} rows have the same ids", flush=True)
    for each in [*found[:SHOWN], *(["..."] if len(found) > SHOWN else [])]:
        print(f"differs: {each}")
    for kind, count in masks(chat, prompts).items():
        print(f"{count} of the rows with answers {kind}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, goes_on=False))
