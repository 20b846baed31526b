"""Given answers: a killed run goes on where it was and ends with the same bytes, and how likely the target
finds them is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import copied, engine
from transformers import AutoModelForCausalLM

from trainer import pipeline
from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.data import as_given
from trainer.data.as_given import AsGiven, InOrder
from trainer.data.chat import Chat
from trainer.data.off_policy import OffPolicy
from trainer.data.prompts import Jsonl, Prompts
from trainer.data.response_rows import mask_of, read_rows
from trainer.data.splits import in_turn
from trainer.data.tally import SAMPLES, Tally, describe
from trainer.engines.transformers import TransformersEngine
from trainer.errors import UserError
from trainer.records import Prompt, Sampling
from trainer.target import Target

ROWS = [{"id": f"p{number}", "turns": [f"{number}" + "x" * (number % 7), "and?"][:1 + number % 2],
         "answers": [f"answer {number}", "so"][:1 + number % 2], "category": "ab"[number % 2]}
        for number in range(23)] + [{"id": "long", "turns": ["y" * 300], "answers": ["z"]}]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    source, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompts.mkdir()
    Prompts(Jsonl(str(source)), None, 4, 0.0, None, None, None).run({}, prompts)
    return {"prompts": prompts}


def run(target: Target, inputs: dict[str, Path], out: Path,
        off_policy: OffPolicy | None = None) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return AsGiven(target, 200, off_policy, None).run(inputs, out)


def test_another_engine_makes_no_answers_stale() -> None:
    """It says how likely they are, and they stay what they are."""
    prints = set()
    for name in ("transformers", "split", "vllm"):
        found = compose_configuration(["recipe=smoke", "responses=as_given", f"target_engine={name}"], find())
        node = found.settings["responses"]
        prints.add(pipeline.fingerprint(node, 1, {}, {}, AsGiven.idle, AsGiven.neutral))
    assert len(prints) == 1
    node["off_policy"]["rows"] += 1
    assert pipeline.fingerprint(node, 1, {}, {}, AsGiven.idle, AsGiven.neutral) not in prints


@pytest.mark.parametrize("lasts", [0, 1, 4, 5, 6, 11, 22, 23])
@pytest.mark.parametrize("torn", [b"", b'{"id": "p', b'{"id": "again#0"}\n'])
def test_a_killed_run_ends_with_the_same_bytes(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path,
                                               lasts: int, torn: bytes,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(tiny_target, inputs, tmp_path / "whole")
    monkeypatch.setattr(as_given, "COMMIT", 5)
    seen: list[str] = []
    given_ = Chat.given

    def watched(chat: Chat, prompt: Prompt) -> Any:
        seen.append(prompt.id)
        if len(seen) == lasts + 1:
            raise KeyboardInterrupt
        return given_(chat, prompt)

    monkeypatch.setattr(Chat, "given", watched)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_target, inputs, tmp_path / "parts")
    with (tmp_path / "parts/responses.jsonl").open("ab") as file:
        file.write(torn)
    assert run(tiny_target, inputs, tmp_path / "parts") == record
    assert len(seen) == len(ROWS) + 1, "none is tokenised twice but the one that was under way"
    whole, parts = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
                    for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() == {"responses.jsonl", "data.json", "data.html"}
    assert all(whole[name] == parts[name] for name in ("responses.jsonl", "data.json"))
    assert record["dropped_ids"] == ["long"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"done": 3}'])
def test_without_a_word_how_far_it_is_whole_all_is_made_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        rows = InOrder(path)
        assert (rows.done, rows.dropped) == (0, [])
        with rows:
            rows.add([{"id": "a"}], ["b"])
        assert path.read_text() == '{"id": "a"}\n'
        rows.beside.write_bytes(damage)
    with InOrder(path) as rows:
        rows.add([{"id": "a"}], [])
    path.write_text("")
    assert InOrder(path).done == 0, "a file that is shorter than it was is not gone on with"


def test_a_prompt_without_an_answer_is_named_wherever_it_stands(tiny_target: Target, tmp_path: Path) -> None:
    for number, rows in enumerate(([{"turns": ["a"]}, {"turns": ["b"], "answers": ["c"]}],
                                   [{"turns": ["b"], "answers": ["c"]}, {"turns": ["a"]}])):
        source, out = tmp_path / f"{number}.jsonl", tmp_path / str(number)
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out.mkdir()
        Prompts(Jsonl(str(source)), None, 0, 0.0, None, None, None).run({}, out)
        with pytest.raises(UserError, match=rf"prompt row-{number + 1} has 1 turns but 0 answers"):
            AsGiven(tiny_target, 90, None, None).foresee({"prompts": out})


class Watched(TransformersEngine):
    """Remembers how many rows were looked at."""

    looked = 0

    def likelihoods(self, rows: Any) -> Iterator[list[float]]:
        for found in super().likelihoods(rows):
            Watched.looked += 1
            yield found


def test_the_score_is_the_likelihood_of_the_supervised_tokens(tiny_target: Target, inputs: dict[str, Path],
                                                              tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    record = run(tiny_target, inputs, tmp_path / "out", OffPolicy(1000, 2.0, engine()))
    model = AutoModelForCausalLM.from_pretrained(tiny_target.folder, dtype=torch.float32).eval()
    own: list[torch.Tensor] = []
    rows = [*read_rows(tmp_path / "out")]
    for row in rows:
        ids, mask = torch.tensor(row["prompt"] + row["tokens"]), torch.tensor(mask_of(row))
        with torch.inference_mode():
            shares = model(ids[None]).logits[0].double().log_softmax(-1)
        own.append(shares[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]])
    count, mean = sum(map(len, own)), float(torch.cat(own).mean())
    above = sum(float(-each.mean()) > math.log(2) for each in own)
    score = record["off_policy"]
    assert (score["rows"], score["tokens"], score["rows_above"]) == (len(rows), count, above)
    assert score["mean_log_likelihood"] == pytest.approx(mean, abs=1e-4)
    assert score["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert json.loads((tmp_path / "out/data.json").read_text())["off_policy"] == score
    assert score["worst"] == sorted(score["worst"], key=lambda each: -each["perplexity"])
    page = (tmp_path / "out/data.html").read_text()
    assert "Off-policy score" in page and "It would not say these answers" in page
    shown = capsys.readouterr().out
    assert "warning: the given answers are not what the target would say" in shown
    assert f"off-policy score: perplexity {score['perplexity']:.2f} of the target on {count:,}" in shown


def test_the_targets_own_answers_are_no_reason_to_warn(tiny_target: Target, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that say one byte again and again."""
    sure = copied(tiny_target, tmp_path / "sure", lambda tensors: [
        tensor.mul_(8) for name, tensor in tensors.items() if name.endswith("norm.weight")])
    with engine().load(sure.folder, sure.end_ids) as loaded:
        ids = Chat.of(sure).prompt([{"role": "user", "content": "hi"}])
        [found] = loaded.generate([ids], ["a"], Sampling(30, 0.0, 1.0, 0))
    row = {"id": "a#0", "split": "train", "category": "chat", "prompt": ids, "tokens": [*found.tokens],
           "finish_reason": "stop"}
    own = OffPolicy(1, 3.0, engine()).measure([row], sure)
    other = OffPolicy(1, 3.0, engine()).measure([{**row, "tokens": [*range(60, 90)]}], sure)
    assert own is not None and other is not None and own["perplexity"] < 3 < other["perplexity"]
    assert capsys.readouterr().out.count("warning: ") == 1


def test_so_many_rows_are_looked_at_and_always_the_same(tiny_target: Target, inputs: dict[str, Path],
                                                        tmp_path: Path) -> None:
    Watched.looked = 0
    watched = OffPolicy(5, 2.0, engine(kind=Watched))
    run(tiny_target, inputs, tmp_path / "out", watched)
    assert Watched.looked == 5
    rows = [*read_rows(tmp_path / "out")]
    one, other = (watched.measure(some, tiny_target) for some in (rows, rows[::-1]))
    assert one is not None and other is not None and one["worst"] == other["worst"]
    short = OffPolicy(5, 2.0, engine(max_length=10))
    assert short.measure(rows, tiny_target) is None, "a row that the engine cannot read is no row to measure"


TEXT = st.text("abc", min_size=1, max_size=3)
ROW = st.fixed_dictionaries({
    "id": TEXT, "split": st.sampled_from(["train", "heldout"]), "category": st.sampled_from("abcd"),
    "prompt": st.lists(st.integers(0, 5), max_size=3),
    "tokens": st.lists(st.integers(0, 5), min_size=1, max_size=4),
    "finish_reason": st.sampled_from(["stop", "length"])})


@given(st.lists(ROW, max_size=30))
def test_a_tally_counts_what_a_list_of_rows_has(rows: list[dict[str, Any]]) -> None:
    tally = Tally.of(rows)
    assert [*tally.tokens] == [len(row["prompt"] + row["tokens"]) for row in rows]
    assert [*tally.supervised] == [len(row["tokens"]) for row in rows]
    assert [*tally.train] == [len(mask_of(row)) for row in rows if row["split"] == "train"]
    assert tally.cut.count == sum(row["finish_reason"] == "length" for row in rows)
    learnable = [row for row in rows if len(row["tokens"]) > 1]
    assert tally.shown() == in_turn(learnable or rows, SAMPLES, lambda row: row["category"])
    for each in tally.by_tag("category"):
        own = [row for row in rows if row["category"] == each["name"]]
        assert (each["rows"], each["train"]) == (len(own), sum(row["split"] == "train" for row in own))
        assert each["supervised"] == sum(len(row["tokens"]) for row in own)


def test_the_record_names_the_first_of_many(tiny_target: Target) -> None:
    rows = [{"id": f"r{number}", "split": "train", "category": "chat", "prompt": [1], "tokens": [2, 3],
             "finish_reason": "length"} for number in range(30)]
    record = describe(Tally.of(rows), tiny_target, [f"d{number}" for number in range(25)])
    assert (record["cut"], len(record["cut_ids"])) == (30, 20)
    assert (record["dropped"], len(record["dropped_ids"])) == (25, 20)
