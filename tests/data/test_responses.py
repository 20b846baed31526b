"""Answers of the tiny target: what is stored, how a stopped run goes on, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import copied, engine, interrupted, regenerate

from trainer.data.as_given import AsGiven
from trainer.data.chat import Chat
from trainer.data.prompts import Jsonl, Prompts, read_prompts
from trainer.data.response_rows import GroupFile
from trainer.data.responses import More, Stored, read_samples
from trainer.data.slices import of_sample
from trainer.engines.base import Group
from trainer.engines.transformers import TransformersEngine
from trainer.errors import UserError
from trainer.records import UNKNOWN, Completion, Sampling
from trainer.target import Target

TALKS = [{"id": f"p{number}", "turns": ["x" * number + "?", "and?"][:1 + (number == 2)], "category": "chat"}
         for number in range(9)]


@pytest.fixture(scope="module")
def talkative(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with many end tokens, so that its answers end by themselves, some at once."""
    ends = [*tiny_target.end_ids, *range(60)]
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target",
                  generation_config={"eos_token_id": ends})


def prompts(folder: Path, rows: list[dict[str, Any]], heldout: int = 0) -> dict[str, Path]:
    source, out = folder / "source.jsonl", folder / "prompts"
    out.mkdir(parents=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Prompts(Jsonl(str(source)), None, heldout, 0.0, None, None, None).run({}, out)
    return {"prompts": out}


def ask(target: Target, inputs: dict[str, Path], out: Path, tokens: int = 12, too_long: Any = "error",
        temperature: float = 0.0, more: int = 0,
        **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    out.mkdir(exist_ok=True)
    names = ("sampling_of", "calls", "thinking")
    changes = {name: settings.pop(name) for name in names if name in settings}
    stage = regenerate(target, engine(**{"batch": 3, **settings}), more=More(more, 0.8, 1.0),
                       sampling=Sampling(tokens, temperature, 1.0, 5), too_long=too_long, **changes)
    record = stage.run(inputs, out)
    return record, [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


def test_the_record_counts_cut_and_empty_answers(talkative: Target, tmp_path: Path) -> None:
    record, rows = ask(talkative, prompts(tmp_path, TALKS), tmp_path / "out")
    ends = {row["id"]: row["tokens"] for row in rows}
    cut = {name for name, tokens in ends.items() if tokens[-1] not in talkative.end_ids}
    empty = {name for name, tokens in ends.items() if len(tokens) == 1 and name not in cut}
    assert record["rows"] == len(rows) == 10 and record["turns_without_room"] == 0
    assert set(record["cut_ids"]) == cut and record["cut"] == len(cut) > 0
    assert set(record["empty_ids"]) == empty and record["empty"] == len(empty) > 0
    assert all(len(ends[name]) == 12 for name in cut)
    assert record["supervised"] == sum(map(len, ends.values()))
    assert record["tokens"] == record["supervised"] + sum(len(row["prompt"]) for row in rows)


def test_the_thinking_mode_of_a_conversation_goes_along(talkative: Target, tmp_path: Path) -> None:
    rows = [{"id": "a", "turns": ["one"], "chat_template_kwargs": {"enable_thinking": True}},
            {"id": "b", "turns": ["two"]}]
    told = replace(talkative, template={"enable_thinking": False})
    modes = []
    for name, target in (("plain", talkative), ("told", told)):
        ask(target, prompts(tmp_path / name, rows), tmp_path / f"{name} answers")
        samples = read_samples(tmp_path / f"{name} answers", "train")
        modes.append({of_sample(each)["thinking"] for each in samples})
    assert modes == [{"on", UNKNOWN}, {"on", "off"}]


def test_stored_ids_are_those_that_went_in_and_came_out(talkative: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["one", "two"], "system": "Be brief."}])
    ask(talkative, inputs, tmp_path / "out")
    first, second = read_samples(tmp_path / "out", "train")
    rows = [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]
    chat = Chat(talkative.tokenizer, {}, talkative.end_ids)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert rows[0]["prompt"] == chat.prompt(said)
    ended = rows[0]["finish_reason"] == "stop"  # by a token that is no part of the text
    answer = talkative.tokenizer.decode(rows[0]["tokens"][:len(rows[0]["tokens"]) - ended],
                                        skip_special_tokens=True)
    said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "two"}]
    assert rows[1]["prompt"] == chat.prompt(said), "a later turn follows the target's own answer"
    for sample, row in zip((first, second), rows, strict=True):
        assert list(sample.tokens) == row["prompt"] + row["tokens"]
        assert sample.loss_mask == (False,) * len(row["prompt"]) + (True,) * len(row["tokens"])


def test_further_answers_are_drawn_for_training_prompts_alone(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, TALKS, heldout=2)
    once = {row["id"]: row for row in ask(tiny_target, inputs, tmp_path / "once")[1]}
    record, rows = ask(tiny_target, inputs, tmp_path / "out", more=2)
    assert [row["id"] for row in rows[:10]] == [*once] and rows[:10] == [*once.values()]
    further = rows[10:]
    trained = {name for name, row in once.items() if row["split"] == "train"}
    assert {row["id"] for row in further} == {
        f"{name.split('#')[0]}~{number}#{name.split('#')[1]}" for name in trained for number in (1, 2)}
    assert all(row["split"] == "train" for row in further) and record["rows"] == 10 + 2 * len(trained)
    assert record["splits"] == {"train": 3 * len(trained), "heldout": 10 - len(trained)}
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        by_prompt.setdefault(row["id"].split("#")[0].split("~")[0], set()).add(tuple(row["tokens"]))
    assert all(len(by_prompt[name.split("#")[0]]) >= 3 for name in trained), "each is drawn with its own seed"
    chat = Chat.of(tiny_target)
    first, later = (next(row for row in further if row["id"] == f"p2~1#{turn}") for turn in (0, 1))
    said = tiny_target.tokenizer.decode(first["tokens"], skip_special_tokens=True)
    assert later["prompt"] == chat.prompt([{"role": "user", "content": "xx?"},
                                           {"role": "assistant", "content": said},
                                           {"role": "user", "content": "and?"}])


def test_the_longest_rows_count_further_answers(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, TALKS, heldout=2)
    stage = regenerate(tiny_target, more=More(2, 0.8, 1.0))
    _, rows = ask(tiny_target, inputs, tmp_path / "out", more=2)
    assert {each.id for each in stage.longest(read_prompts(inputs["prompts"]))} == {row["id"] for row in rows}


def test_an_id_that_a_further_answer_would_take_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["x"]}, {"id": "a~1", "turns": ["y"]}])
    stage = regenerate(tiny_target, more=More(1, 0.8, 1.0))
    with pytest.raises(UserError, match=r"prompt a~1 has the id that responses\.more\.answers gives"):
        stage.foresee(inputs)


@pytest.mark.parametrize(("temperature", "more"), [(0.0, 0), (0.8, 0), (0.0, 1)])
def test_an_interrupted_run_ends_with_the_same_bytes(talkative: Target, tmp_path: Path,
                                                     temperature: float, more: int) -> None:
    inputs = prompts(tmp_path, TALKS)
    record, _ = ask(talkative, inputs, tmp_path / "whole", temperature=temperature, more=more)
    with pytest.raises(KeyboardInterrupt):
        ask(talkative, inputs, tmp_path / "parts", temperature=temperature, more=more, kind=interrupted(3))
    path = tmp_path / "parts" / "responses.jsonl"
    assert 0 < len(path.read_bytes()) < len((tmp_path / "whole" / "responses.jsonl").read_bytes())
    with path.open("ab") as file:
        file.write(b'{"id": "p0#0", "split": "tr')
    again, _ = ask(talkative, inputs, tmp_path / "parts", temperature=temperature, more=more)
    assert path.read_bytes() == (tmp_path / "whole" / "responses.jsonl").read_bytes()
    assert again == record


def test_a_run_killed_in_the_middle_of_a_group_ends_with_the_same_bytes(talkative: Target,
                                                                         tmp_path: Path) -> None:
    """Answers move the bar on before their group is whole; a group that is not is computed again."""

    class Killed(TransformersEngine):
        def completions(self, groups: Iterable[Group],
                        sampling: Sampling) -> Iterator[tuple[str, Completion]]:
            for number, each in enumerate(super().completions(groups, sampling)):
                if number == 5:
                    raise KeyboardInterrupt
                yield each

    inputs = prompts(tmp_path, TALKS)
    record, _ = ask(talkative, inputs, tmp_path / "whole", batch=4)
    with pytest.raises(KeyboardInterrupt):
        ask(talkative, inputs, tmp_path / "parts", batch=4, kind=Killed)
    path = tmp_path / "parts" / "responses.jsonl"
    assert len(path.read_text().splitlines()) == 4 and len([*path.parent.iterdir()]) == 1
    again, _ = ask(talkative, inputs, tmp_path / "parts", batch=4)
    assert path.read_bytes() == (tmp_path / "whole" / "responses.jsonl").read_bytes()
    assert again == record and {each.name for each in path.parent.iterdir()} == {
        each.name for each in (tmp_path / "whole").iterdir()}


def row(name: str, *tokens: int, category: str = "chat") -> dict[str, Any]:
    return {"id": name, "split": "train", "category": category, "prompt": [7], "tokens": list(tokens),
            "finish_reason": "stop"}


GROUPS = [[row("a", 1, 2), row("b")], [row("c", category="é\u2028")], [row("d", 3), row("e", 4), row("f", 5)]]


@pytest.mark.parametrize("noise", [b"", b"\0\0\0\0\0", b"\xff", b"null\n", b"[1]\n{}\n"])
def test_a_file_cut_anywhere_keeps_whole_groups_and_is_finished_alike(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "file.jsonl"
    whole = GroupFile(path)
    ends = [0]
    for group in GROUPS:
        whole.append(group)
        ends.append(path.stat().st_size)
    expected = path.read_bytes()
    for cut in sorted({*range(0, len(expected) + 1, 7), *ends, *(end - 1 for end in ends[1:])}):
        path.write_bytes(expected[:cut] + noise)
        found = GroupFile(path)
        kept = max(index for index, end in enumerate(ends) if end <= cut)
        assert list(found.rows.values()) == [row for group in GROUPS[:kept] for row in group]
        for group in GROUPS:
            if not found.has(group):
                found.append(group)
        assert path.read_bytes() == expected and GroupFile(path).rows == whole.rows


@pytest.mark.parametrize("line", [b"null\n", b"{}\n", b"7\n", b"\0\0\n", b'{"id": "a", "tokens": ["x"]}\n'])
def test_a_damaged_row_before_whole_groups_is_no_torn_tail(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "file.jsonl"
    whole = GroupFile(path)
    for group in GROUPS:
        whole.append(group)
    before = path.read_bytes()
    path.write_bytes(line + before)
    with pytest.raises(UserError, match="line 1: is no row of answers .*, with whole groups behind"):
        GroupFile(path)
    assert path.read_bytes() == line + before, "nothing is cut that may be mended"


@pytest.mark.parametrize(("change", "said"), [
    (lambda row: None, "expected an object, found NoneType"),
    (lambda row: row | {"tokens": "1"}, "tokens missing"),
    (lambda row: {**row, "split": 1}, "split missing or of another kind"),
    (lambda row: row | {"mask": [True]}, "its mask is of another length")])
def test_answers_from_elsewhere_are_rows_of_answers(tiny_target: Target, tmp_path: Path, change: Any,
                                                    said: str) -> None:
    text = "".join(json.dumps(each) + "\n" for each in (row("a", 1, 2), change(row("b", 3))))
    (tmp_path / "responses.jsonl").write_text(text)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=f"responses.jsonl, line 2: is no row of answers .*{said}"):
        Stored(tiny_target, str(tmp_path)).run({}, tmp_path / "out")


def test_a_prompt_without_room_is_an_error_or_dropped_and_counted(talkative: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "short", "turns": ["a"]}, {"id": "long", "turns": ["b" * 100]}])
    with pytest.raises(UserError,
                       match=r"prompt long has 1\d\d tokens, .* target_engine.max_length=80; .*=drop"):
        ask(talkative, inputs, tmp_path / "out", max_length=80)
    stage = regenerate(talkative, engine(max_length=80))
    with pytest.raises(UserError, match="prompt long has"):
        stage.foresee(inputs)
    replace(stage, too_long="drop").foresee(inputs)
    record, rows = ask(talkative, inputs, tmp_path / "out", max_length=80, too_long="drop")
    assert record["dropped"] == 1 and record["dropped_ids"] == ["long"]
    assert [row["id"] for row in rows] == ["short#0"]
    with pytest.raises(UserError, match="all 2 prompts are longer"):
        ask(talkative, inputs, tmp_path / "none", max_length=10, too_long="drop")


def test_turns_whose_history_outgrew_the_limit_are_counted(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["one", "two", "three"]}, {"id": "b", "turns": ["x"]}])
    record, rows = ask(tiny_target, inputs, tmp_path / "out", max_length=50, tokens=100)
    assert sorted(row["id"] for row in rows) == ["a#0", "b#0"] and record["turns_without_room"] == 2
    assert max(len(row["prompt"] + row["tokens"]) for row in rows) == 50


def test_given_answers_are_kept_with_a_mask_from_the_template(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a[/x]", "turns": ["one", "two"], "answers": ["first", "second"]},
                                {"id": "b", "turns": ["y" * 90], "answers": ["z"]},
                                {"id": "c", "turns": ["y"], "answers": [""]}])
    out = tmp_path / "out"
    out.mkdir()
    record = AsGiven(tiny_target, 90, None, None).run(inputs, out)
    given, empty = read_samples(out, "train")
    green = [token for token, flag in zip(given.tokens, given.loss_mask, strict=True) if flag]
    assert tiny_target.tokenizer.decode(green) == "first<|im_end|>second<|im_end|>"
    assert (given.id, empty.id, empty.supervised) == ("a[/x]#0", "c#0", 1)
    assert record["dropped_ids"] == ["b"] and record["empty_ids"] == ["c#0"] and record["rows"] == 2
    with pytest.raises(UserError, match="all 3 conversations are longer than responses.max_length=5; raise "
                                        "target.max_length"):
        AsGiven(tiny_target, 5, None, None).run(inputs, out)


def test_every_turn_needs_a_given_answer(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["one", "two"], "answers": ["first"]}])
    with pytest.raises(UserError, match="prompt a has 2 turns but 1 answers"):
        AsGiven(tiny_target, 90, None, None).foresee(inputs)


def test_given_answers_that_are_all_empty_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "turns": ["y"], "answers": [""]}, {"id": "b", "turns": ["z"]},
                                {"id": "c", "turns": ["x"], "answers": [" "]}])
    with pytest.raises(UserError, match="the 3 prompts bring no answer that is not empty; responses="):
        AsGiven(tiny_target, 90, None, None).run(inputs, tmp_path)


def test_some_training_prompt_must_be_left(tiny_target: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"turns": ["y" * 90], "answers": ["z"]},
                                {"turns": ["y"], "answers": ["z"], "split": "heldout"}], heldout=1)
    with pytest.raises(UserError, match="no training prompt is left: 1 prompts are too long, and the rest"):
        AsGiven(tiny_target, 90, None, None).run(inputs, tmp_path)


def test_a_target_that_gives_nothing_to_learn_from_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """Every answer is one end token."""
    silent = replace(tiny_target)
    silent.__dict__["end_ids"] = tuple(range(320))
    with pytest.raises(UserError, match="in 10 rows 10 are supervised, and none of them is more than"):
        ask(silent, prompts(tmp_path, TALKS), tmp_path / "out")


def test_only_what_happened_is_remarked(tiny_target: Target, talkative: Target, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """A text that looks like markup is shown as it is."""
    inputs = prompts(tmp_path, [{"id": "[/b]:warning:", "turns": ["[/x] [red]:smile:"], "answers": ["[/y]"]}])
    out = tmp_path / "out"
    out.mkdir()
    AsGiven(tiny_target, 200, None, None).run(inputs, out)
    shown = capsys.readouterr().out
    assert "[/b]:warning:#0, supervised tokens in green:\n" in shown and "[/x] [red]:smile:" in shown
    assert shown.splitlines()[-1].endswith("in 1 rows")
    record, _ = ask(talkative, prompts(tmp_path / "more", TALKS), tmp_path / "asked")
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        f"in 10 rows; {record['cut']} reached the limit of tokens; {record['empty']} are empty")


def test_a_sequence_has_positions_in_the_target(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="target_engine.max_length=2049 is more than the 2048 positions"):
        regenerate(tiny_target, engine(max_length=2049)).preflight()
    with pytest.raises(UserError, match="target.max_length=3000 is more than"):
        AsGiven(replace(tiny_target, max_length=3000), 3000, None, None).preflight()
    regenerate(tiny_target, engine(max_length=2048)).preflight()


LOOK = {"name": "look", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
ERRAND = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "c", "content": "wet"},
          {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Sure?"},
          {"role": "assistant", "content": "Yes."}]
TOOLS = ("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<|im_start|>"
         "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
         "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="module")
def handy(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with a template that shows tools and calls."""
    made = copied(tiny_target, tmp_path_factory.mktemp("made") / "target")
    (made.folder / "chat_template.jinja").write_text(TOOLS)
    return made


def test_a_result_follows_the_call_that_it_belongs_to(handy: Target, tmp_path: Path) -> None:
    """The target answers each time; what it says in place of a call that has a result is not gone on from."""
    inputs = prompts(tmp_path, [{"id": "a", "messages": ERRAND, "tools": [LOOK]}])
    _, rows = ask(handy, inputs, tmp_path / "out")
    texts = [handy.tokenizer.decode(row["prompt"]) for row in rows]
    opened, end = "<|im_start|>assistant\n", "<|im_end|>\n"
    assert [row["id"] for row in rows] == ["a#0", "a#1", "a#2"]
    assert texts[0] == f"look;<|im_start|>user\nRain?{end}{opened}"
    assert texts[1] == f'{texts[0]}{{"at": "sky"}}{end}<|im_start|>tool\nwet{end}{opened}'
    own = handy.tokenizer.decode(rows[1]["tokens"], skip_special_tokens=True)
    assert own != "It rains."
    assert texts[2] == f"{texts[1]}{own}{end}<|im_start|>user\nSure?{end}{opened}"


def test_given_answers_with_calls_are_one_row(handy: Target, tmp_path: Path) -> None:
    inputs = prompts(tmp_path, [{"id": "a", "messages": ERRAND, "tools": [LOOK]}])
    out = tmp_path / "out"
    out.mkdir()
    AsGiven(handy, 512, None, None).run(inputs, out)
    [sample] = read_samples(out, "train")
    learnt = [token for token, flag in zip(sample.tokens, sample.loss_mask, strict=True) if flag]
    assert handy.tokenizer.decode(learnt) == '{"at": "sky"}<|im_end|>It rains.<|im_end|>Yes.<|im_end|>'
