"""What later turns go on from: the target's own calls with the results of the data, or what is set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_responses import ask, prompts
from test_speech import BOTH
from test_templates import THINKING
from tiny import copied

from trainer.data.history import LEFT_OUT
from trainer.engines.base import Group
from trainer.engines.transformers import TransformersEngine
from trainer.errors import UserError
from trainer.records import Completion, Sampling
from trainer.target import Target

LOOK = {"name": "look", "parameters": {"type": "object"}}
CALL = {"id": "c7", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
ERRAND = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "c7", "content": "wet"},
          {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Sure?"},
          {"role": "assistant", "content": "Yes."}]
SHOWN = BOTH.replace("tool\n{{ m.content }}", "tool\n{{ m.tool_call_id }}:{{ m.content }}")
OPENED, END = "<|im_start|>assistant\n", "<|im_end|>\n"
ROW = {"id": "a", "messages": ERRAND, "tools": [LOOK]}


def saying(target: Target, *texts: str) -> type[TransformersEngine]:
    """An engine that says so, one text each time that it is asked."""

    class Saying(TransformersEngine):
        said = iter(texts)

        def completions(self, groups: Iterable[Group],
                        sampling: Sampling) -> Iterator[tuple[str, Completion]]:
            for group in groups:
                for key in group:
                    ids = target.tokenizer(f"{next(Saying.said)}<|im_end|>", add_special_tokens=False)
                    yield key, Completion(tuple(ids.input_ids), "stop")

    return Saying


@pytest.fixture(scope="module")
def handy(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with a template that shows reasoning, calls and the ids of results."""
    made = copied(tiny_target, tmp_path_factory.mktemp("made") / "target")
    (made.folder / "chat_template.jinja").write_text(SHOWN)
    return made


def talk(target: Target, folder: Path, row: dict[str, Any], *texts: str,
         **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The record, and what the target was asked in each turn."""
    record, rows = ask(target, prompts(folder, [row]), folder / "out", kind=saying(target, *texts),
                       **settings)
    return record, [target.tokenizer.decode(each["prompt"]) for each in rows]


OWN = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
NOTHING = {"own": 0, "other_arguments": 0, "recorded": 0, "dropped": 0}


@pytest.mark.parametrize(("arguments", "outcome"), [("sky", "own"), ("sea", "other_arguments")])
@pytest.mark.parametrize("calls", ["recorded", "drop"])
def test_a_result_follows_the_target_s_own_call(handy: Target, tmp_path: Path, arguments: str, outcome: str,
                                                calls: str) -> None:
    said = OWN.replace("sky", arguments)
    record, asked = talk(handy, tmp_path, ROW, said, "<think>\nhm\n</think>\n\nWet.", "Yes.", calls=calls)
    assert asked[0] == f"<|im_start|>user\nRain?{END}{OPENED}"
    assert asked[1] == f"{asked[0]}{said}{END}<|im_start|>tool\nc7:wet{END}{OPENED}"
    assert asked[2] == f"{asked[1]}<think>\nhm\n</think>\n\nWet.{END}<|im_start|>user\nSure?{END}{OPENED}"
    assert record["calls"] == {**NOTHING, outcome: 1} and record["turns_without_room"] == 0


@pytest.mark.parametrize("said", ["It is dry.", OWN.replace("look", "listen"), f"{OWN}\n{OWN}"])
def test_without_such_a_call_the_data_s_own_stands_there(handy: Target, tmp_path: Path, said: str) -> None:
    record, asked = talk(handy, tmp_path, ROW, said, "Wet.", "Yes.")
    assert asked[1] == f"{asked[0]}{OWN}{END}<|im_start|>tool\nc7:wet{END}{OPENED}"
    assert asked[2].startswith(f"{asked[1]}Wet.{END}")
    assert record["calls"] == {**NOTHING, "recorded": 1} and record["ended_at_calls"] == 0


def test_or_the_conversation_ends_there_and_is_counted(handy: Target, tmp_path: Path) -> None:
    record, asked = talk(handy, tmp_path, ROW, "It is dry.", calls="drop")
    assert len(asked) == 1 and record["calls"] == {**NOTHING, "dropped": 1}
    assert record["ended_at_calls"] == 1 and record["turns_without_room"] == 0
    data = json.loads((tmp_path / "out/data.json").read_text())
    assert {"why": LEFT_OUT, "count": 1, "examples": ["a#0"]} in data["left_out"]
    assert data["calls"]["dropped"] == 1 and "Calls of tools" in (tmp_path / "out/data.html").read_text()


@pytest.mark.parametrize(("row", "recorded"), [
    ({"id": "a", "turns": ["Rain?", "Sure?"], "tools": [LOOK]}, False),
    ({"id": "a", "turns": ["Rain?", "Sure?"], "answers": ["It rains."], "tools": [LOOK]}, True)])
def test_a_call_of_which_there_is_no_result_is_never_left_open(handy: Target, tmp_path: Path,
                                                               row: dict[str, Any], recorded: bool) -> None:
    record, asked = talk(handy, tmp_path, row, OWN, "Yes.")
    assert record["calls"] == {**NOTHING, "recorded" if recorded else "dropped": 1}
    assert len(asked) == 1 + recorded
    if recorded:
        assert asked[1] == f"{asked[0]}It rains.{END}<|im_start|>user\nSure?{END}{OPENED}"


def test_history_keeps_or_drops_reasoning_as_the_template_does(tiny_target: Target, tmp_path: Path) -> None:
    dropping = copied(tiny_target, tmp_path / "target")
    (dropping.folder / "chat_template.jinja").write_text(THINKING)
    _, asked = talk(dropping, tmp_path / "run", {"id": "a", "turns": ["2+2?", "3+3?"]},
                    "<think>\nsum\n</think>\n\n4", "6")
    assert asked[1] == f"{asked[0]}4{END}<|im_start|>user\n3+3?{END}{OPENED}"


def test_reasoning_stays_inside_a_loop_of_tools(tiny_target: Target, tmp_path: Path) -> None:
    """As a template does that drops it before the last question alone."""
    template = SHOWN.replace("{% for m in messages %}", "{% set ns = namespace(last=0) %}"
                             "{% for m in messages %}{% if m.role == 'user' %}"
                             "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
                             "{% for m in messages %}", 1).replace(
        "{% if m.reasoning %}", "{% if m.reasoning and loop.index0 > ns.last %}")
    made = copied(tiny_target, tmp_path / "target")
    (made.folder / "chat_template.jinja").write_text(template)
    said = f"<think>\nI look\n</think>\n\n{OWN}"
    record, asked = talk(made, tmp_path / "run", ROW, said, "<think>\nhm\n</think>\n\nWet.", "Yes.")
    assert asked[1] == f"{asked[0]}{said}{END}<|im_start|>tool\nc7:wet{END}{OPENED}"
    assert "<think>" not in asked[2] and f"{OWN}{END}" in asked[2] and f"{OPENED}Wet.{END}" in asked[2]
    assert record["calls"]["own"] == 1


def test_sampling_is_that_of_the_target_s_own_file(tiny_target: Target, tmp_path: Path) -> None:
    made = copied(tiny_target, tmp_path / "target", generation_config={
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None})
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["x"]}])
    record, _ = ask(made, inputs, tmp_path / "out", sampling_of="target")
    assert record["sampling"] == {"max_new_tokens": 12, "temperature": 0.6, "top_p": 0.95, "seed": 5,
                                  "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    assert json.loads((tmp_path / "out/data.json").read_text())["sampling"] == record["sampling"]
    plain, _ = ask(made, inputs, tmp_path / "plain")
    assert plain["sampling"]["temperature"] == 0.0 and plain["sampling"]["top_k"] == 0


@pytest.mark.parametrize(("name", "value"), [("temperature", "warm"), ("top_p", 0), ("top_k", True),
                                             ("min_p", 2), ("repetition_penalty", 0)])
def test_a_file_of_nonsense_is_refused(tiny_target: Target, tmp_path: Path, name: str, value: Any) -> None:
    made = copied(tiny_target, tmp_path / "target", generation_config={name: value})
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["x"]}])
    with pytest.raises(UserError, match=rf"generation_config.json says {name} .*, expected a number from"):
        ask(made, inputs, tmp_path / "out", sampling_of="target")
    (made.folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="has no generation_config.json to sample by; set responses.sampl"):
        ask(made, inputs, tmp_path / "out", sampling_of="target")
