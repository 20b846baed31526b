"""Which conversations think: a share of them, by seed and id alone, told to every stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_templates import OPENED, THINKING, chat_of
from tiny import copied, regenerate

from trainer.data.as_given import AsGiven
from trainer.data.prompts import FACTS, Jsonl, Prompts, read_prompts
from trainer.data.response_rows import read_samples
from trainer.data.slices import of_sample
from trainer.data.slices import thinking as mode_of
from trainer.data.thinking import Thinking, modes
from trainer.errors import UserError
from trainer.records import Prompt
from trainer.target import Target

MIXED = Thinking(0.3, "enable_thinking", 5)
MANY = [Prompt(f"p{number}", ("x",)) for number in range(2000)]


def test_a_share_of_them_thinks() -> None:
    for share in (0.0, 0.3, 1.0):
        found = modes(replace(MIXED, share=share).told(MANY))
        assert abs(found.get("on", 0) / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5 + 1e-9
        assert found.get("on", 0) + found.get("off", 0) == 2000


@given(st.sets(st.integers(0, 1999), max_size=20), st.integers(0, 9))
def test_the_mode_is_that_of_seed_and_id(numbers: set[int], seed: int) -> None:
    drawn = replace(MIXED, seed=seed)
    some = [MANY[number] for number in numbers]
    assert drawn.told(some) == [drawn.of(prompt) for prompt in some]
    assert drawn.told(some[::-1]) == drawn.told(some)[::-1]


def test_seeds_and_shares_decide_it() -> None:
    def thinks(told: Thinking) -> set[str]:
        return {prompt.id for prompt in told.told(MANY) if mode_of(prompt.template) == "on"}

    assert thinks(MIXED) != thinks(replace(MIXED, seed=6))
    assert thinks(MIXED) < thinks(replace(MIXED, share=0.6)), "with a larger share more of them, and the same"


@pytest.mark.parametrize("own", [{"enable_thinking": False}, {"thinking": True}, {"reasoning_effort": "low"}])
def test_a_row_that_says_its_mode_keeps_it(own: dict[str, Any]) -> None:
    prompt = Prompt("a", ("x",), template=own)
    assert replace(MIXED, share=1.0).of(prompt) == prompt


def test_a_template_that_does_not_read_the_argument_is_refused() -> None:
    MIXED.require_read(chat_of(THINKING))
    for refused in (replace(MIXED, argument="thinking"), MIXED):
        with pytest.raises(UserError, match=f"prompts.thinking.argument={refused.argument} changes nothing"):
            refused.require_read(chat_of(THINKING if refused is not MIXED else OPENED))


def test_the_mode_goes_through_all_stages(tiny_target: Target, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    target = copied(tiny_target, tmp_path / "target")
    (target.folder / "chat_template.jinja").write_text(THINKING)
    source, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts"
    rows = [{"id": f"p{number}", "turns": [f"{number}?"], "answers": ["so"]} for number in range(12)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts.mkdir()
    half = Thinking(0.5, "enable_thinking", 1)
    record = Prompts(Jsonl(str(source)), None, 3, 0.0, None, None, half).run({}, prompts)
    told = {prompt.id: mode_of(prompt.template) for prompt, _ in read_prompts(prompts)}
    assert {*told.values()} == {"on", "off"} and sum(record["thinking"].values()) == 12
    assert record["thinking"] == json.loads((prompts / FACTS).read_text())["thinking"]
    assert f"prompts: thinking off in {record['thinking']['off']}, on in " in capsys.readouterr().out
    for name, stage in (("own", regenerate(target, thinking=half)),
                        ("given", AsGiven(target, 500, None, half))):
        out = tmp_path / name
        out.mkdir()
        stage.preflight()
        stage.run({"prompts": prompts}, out)
        samples = [*read_samples(out, "train"), *read_samples(out, "heldout")]
        assert {sample.id.partition("#")[0]: of_sample(sample)["thinking"] for sample in samples} == told
        for sample in samples:
            asked = target.tokenizer.decode(sample.tokens[:sample.loss_mask.index(True)])
            assert asked.endswith("</think>\n\n") == (of_sample(sample)["thinking"] == "off")
        assert json.loads((out / "data.json").read_text())["thinking"] == record["thinking"]
    plain = tiny_target
    with pytest.raises(UserError, match="changes nothing in what the chat template of"):
        regenerate(plain, thinking=half).preflight()
    with pytest.raises(UserError, match="changes nothing in what the chat template of"):
        AsGiven(plain, 500, None, half).preflight()
