"""Prompts that the tiny target makes up: what they begin with, which are kept, how a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import copied, engine, interrupted, regenerate

from trainer.data.chat import Chat, messages_of
from trainer.data.own_prompts import OWN_PROMPTS, OwnPrompts
from trainer.data.prompts import Jsonl, Prompts
from trainer.data.response_rows import read_samples
from trainer.data.responses import More, Regenerate
from trainer.engines.transformers import TransformersEngine
from trainer.errors import UserError
from trainer.records import Prompt, Sampling
from trainer.target import Target

OWN = OwnPrompts(20, 6, 1.0, 1.0)


@pytest.fixture(scope="module")
def talkative(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target with many end tokens, so that what it says ends by itself, now and then at once."""
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target",
                  generation_config={"eos_token_id": [*tiny_target.end_ids, *range(100)]})


def draw(target: Target, folder: Path, known: Sequence[Prompt] = (), own: OwnPrompts = OWN,
         kind: type[TransformersEngine] = TransformersEngine) -> list[Prompt]:
    folder.mkdir(exist_ok=True)
    with engine(batch=3, kind=kind).load(target.folder, target.end_ids) as loaded:
        return own.draw(Chat.of(target), loaded, 5, known, folder)


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / OWN_PROMPTS).read_text().splitlines()]


@pytest.mark.parametrize("words", ["a", "What is this?", "¿Qué?", "  two  spaces"])
def test_what_a_chat_begins_with_stands_before_any_words(tiny_target: Target, words: str) -> None:
    chat = Chat.of(tiny_target)
    opening = chat.opening()
    whole = chat.prompt([{"role": "user", "content": words}])
    assert whole[:len(opening)] == opening
    assert chat.tokenizer.decode(whole[len(opening):]).startswith(words)


def test_only_prompts_that_ended_and_are_new_are_kept(talkative: Target, tmp_path: Path) -> None:
    found = draw(talkative, tmp_path / "first")
    drawn = {row["id"]: row for row in rows(tmp_path / "first")}
    assert [*drawn] == OWN.ids() and len({prompt.turns[0] for prompt in found}) == len(found)
    assert 0 < len(found) < OWN.prompts
    decode = Chat.of(talkative).tokenizer.decode
    ended = {name for name, row in drawn.items() if row["finish_reason"] == "stop"
             and decode(row["tokens"], skip_special_tokens=True).strip()}
    assert {prompt.id for prompt in found} <= ended
    assert all(len(Chat.of(talkative).prompt(messages_of(prompt, []))) <= OWN.longest(Chat.of(talkative))
               for prompt in found)
    assert all(prompt.turns == (decode(drawn[prompt.id]["tokens"], skip_special_tokens=True).strip(),)
               for prompt in found)
    known = Prompt("held", (f" {found[2].turns[0]}\n",))
    assert draw(talkative, tmp_path / "again", [known]) == [*found[:2], *found[3:]]


def test_each_is_drawn_with_a_seed_of_its_own_whatever_the_groups(talkative: Target, tmp_path: Path) -> None:
    few = draw(talkative, tmp_path / "few", own=replace(OWN, prompts=7))
    many = draw(talkative, tmp_path / "many")
    assert few == [prompt for prompt in many if prompt.id <= "own-000007"]


def test_a_stopped_run_ends_with_the_same_bytes(talkative: Target, tmp_path: Path) -> None:
    whole = draw(talkative, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        draw(talkative, tmp_path / "parts", kind=interrupted(4))
    assert len(rows(tmp_path / "parts")) == 9
    assert draw(talkative, tmp_path / "parts") == whole
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def stage(target: Target, folder: Path, own: OwnPrompts,
          max_length: int = 512) -> tuple[Regenerate, dict[str, Path]]:
    source, out = folder / "source.jsonl", folder / "prompts"
    out.mkdir()
    source.write_text("".join(json.dumps({"id": f"p{number}", "turns": ["x" * number + "?"]}) + "\n"
                              for number in range(4)))
    Prompts(Jsonl(str(source)), None, 1, 0.0, None, None, None).run({}, out)
    return regenerate(target, engine(batch=3, max_length=max_length), sampling=Sampling(8, 0.0, 1.0, 5),
                      own=own, more=More(1, 0.8, 1.0)), {"prompts": out}


def test_they_are_answered_for_training_and_counted(talkative: Target, tmp_path: Path) -> None:
    asked, inputs = stage(talkative, tmp_path, OWN)
    out = tmp_path / "out"
    out.mkdir()
    record = asked.run(inputs, out)
    own = draw(talkative, tmp_path / "own")
    train = {sample.id: sample for sample in read_samples(out, "train")}
    assert {name for name in train if name.startswith("own")} == {
        f"{prompt.id}{again}#0" for prompt in own for again in ("", "~1")}
    assert [sample.id for sample in read_samples(out, "heldout") if sample.id.startswith("own")] == []
    assert (record["own_prompts"], record["own_left_out"]) == (len(own), OWN.prompts - len(own))
    assert record["categories"]["own"] == 2 * len(own)
    chat = Chat.of(talkative)
    for prompt in own:
        ids = chat.prompt(messages_of(prompt, []))
        assert list(train[f"{prompt.id}#0"].tokens[:len(ids)]) == ids
    foreseen = {each.id: each.tokens for each in asked.longest([])}
    assert all(len(sample.tokens) <= foreseen[name] for name, sample in train.items()
               if name.startswith("own"))


def test_what_cannot_be_is_said_before_anything_is_drawn(tiny_target: Target, tmp_path: Path) -> None:
    asked, _ = stage(tiny_target, tmp_path, OWN, max_length=25)
    with pytest.raises(UserError, match=r"own.max_new_tokens=6 gives prompts of up to \d+ tokens, .*=25; "):
        asked.preflight()
    with pytest.raises(UserError, match=r"prompt own-000003 has the id that responses\.own\.prompts gives"):
        OWN.require_free([Prompt("own-000003", ("x",))])
    with pytest.raises(UserError, match=r"none of the 2 prompts .* within responses.own.max_new_tokens=1:"):
        draw(tiny_target, tmp_path / "never", own=OwnPrompts(2, 1, 1.0, 1.0))
    (tmp_path / "none").mkdir()
    assert draw(tiny_target, tmp_path / "none", own=replace(OWN, prompts=0)) == []
    assert not (tmp_path / "none" / OWN_PROMPTS).exists()


def test_a_template_that_hides_the_users_words_is_named(tiny_target: Target) -> None:
    chat = Chat.of(tiny_target)
    tokenizer = type(chat.tokenizer).from_pretrained(tiny_target.folder)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}]{% endfor %}"
    with pytest.raises(UserError, match=r"writes nothing before a user's words, .*responses\.own\.prompts=0"):
        replace(chat, tokenizer=tokenizer).opening()
