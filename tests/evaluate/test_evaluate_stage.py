"""Stage `evaluate` in this process: real drafting from the exported folder, rows, and gates."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    copied,
    dflash,
    engine,
    make_dflash,
    make_small,
    regenerate,
    small,
    uneven,
    write_responses,
)
from vllm_support import small_server

from trainer._paths import find
from trainer.architectures.dflash import DFlash
from trainer.compose import compose_configuration
from trainer.data.as_given import AsGiven
from trainer.data.prompts import Jsonl, Prompts
from trainer.data.response_rows import read_rows
from trainer.engines.vllm_client import SpecCounters
from trainer.errors import GateFailed, UserError
from trainer.evaluate.agreement import agreement_gates
from trainer.evaluate.decode import Verifying, decode
from trainer.evaluate.rows import Tally, in_process, served
from trainer.evaluate.serving import Measurement, acceptance
from trainer.evaluate.stage import Evaluate
from trainer.export.formats import FORMATS, Serving
from trainer.kernels.select import verify
from trainer.records import Sample, Sampling
from trainer.target import Target

PROMPTS = [{"id": f"{kind}{number}", "turns": [f"{kind} {number}?"], "category": kind, "split": "heldout"}
           for number in range(3) for kind in ("chat", "maths")] + [{"turns": ["train"], "split": "train"}]


@pytest.fixture(scope="module")
def inputs(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("prompts", "export"):
        (folder / name).mkdir()
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    Prompts(Jsonl(str(source)), None, 6, 0.0, None, None, None).run({}, folder / "prompts")
    drafter = uneven(dflash(tiny_target, block_size=8, layers=1))
    FORMATS["speculators"].write(folder / "export/speculators", drafter.export(),
                                Serving("t", ["LlamaForCausalLM"], 3), torch.float32)
    (folder / "export/export.json").write_text(json.dumps({"method": "dflash", "max_k": 7, "target": "t"}))
    return {"prompts": folder / "prompts", "export": folder / "export"}


def stage(target: Target, **changes: Any) -> Evaluate:
    return Evaluate(**{"target": target, "drafter": make_dflash(), "engine": engine(), "server": None,
                       "dtype": "float32", "sampling": Sampling(12, 0.0, 1.0, 0), "prompts": 6,
                       "turns": "all", "weights": {}, "too_long": "error", "k": [3],
                       "users": 1, "warmup": 0, "rounds": 2, "format": "speculators",
                       "confidence": None, "agreement": 0.02, "runtime": Verifying("cpu"), **changes})


def test_rows_hold_what_was_decoded(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    record = stage(tiny_target, k=[3, 7]).run(inputs, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["dataset"], row["num_speculative_tokens"]) for row in rows] == [
        ("heldout", 3), ("heldout", 7), ("heldout/chat", 3), ("heldout/maths", 3)]
    for row in rows:
        positions = row["per_position_acceptance"]
        assert len(positions) == row["num_speculative_tokens"]
        assert positions == sorted(positions, reverse=True)
        assert row["mean_accepted_length"] == pytest.approx(1 + sum(positions), abs=1e-3)
        assert row["acceptance_rate"] == pytest.approx(sum(positions) / len(positions), abs=1e-3)
        assert row["engine"] == "in_process" and row["lossless"] is True and row["speedup"] is None
        assert (row["model"], row["method"], row["dtype"], row["users"]) == ("tiny", "dflash", "float32", 1)
    for figure in ("drafts", "output_tokens", "prompts"):
        assert rows[0][figure] == rows[2][figure] + rows[3][figure] > 0
    assert record["lossless"] is True and record["gates"]["in_process_lossless"]["passed"]
    assert record["accepted_length"] == rows[0]["mean_accepted_length"] and record["k"] == 3


def test_the_folder_is_what_is_measured(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    """Counts equal a decoding with the drafter that was exported, whatever the settings of the run say."""
    stage(tiny_target, drafter=partial(DFlash, seed=99)).run(inputs, tmp_path)
    [row] = [row for row in json.loads((tmp_path / "rows.json").read_text()) if row["dataset"] == "heldout"]
    drafter, total = uneven(dflash(tiny_target, block_size=8, layers=1)).eval(), Tally()
    with engine().load(tiny_target.folder, tiny_target.end_ids) as loaded:
        for prompt in PROMPTS[:6]:
            ids = tiny_target.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt["turns"][0]}], add_generation_prompt=True,
                return_dict=False)
            [plain] = loaded.generate([ids], ["any"], Sampling(12, 0.0, 1.0, 0))
            total.add(decode(loaded, drafter, verify("cpu"), ids, 3, 12, tiny_target.end_ids), plain)
    assert row == in_process({key: row[key] for key in ("model", "method", "users", "dtype", "possible_k")},
                             "heldout", 3,
                             total)
    assert (row["prompts"], row["output_tokens"]) == (6, total.output_tokens)


def test_drafts_cut_by_confidence_have_rows_of_their_own(tiny_target: Target, inputs: dict[str, Path],
                                                        tmp_path: Path) -> None:
    """After the others, under their own name, with what was verified of each draft."""
    drafter = uneven(small(tiny_target, "dspark"))
    FORMATS["speculators"].write(tmp_path / "export/speculators", drafter.export(),
                                 Serving("t", ["LlamaForCausalLM"], 3), torch.float32)
    (tmp_path / "export/export.json").write_text(json.dumps(
        {"method": "dspark", "max_k": 5, "target": "t", "confidence": {"temperatures": [2.0] * 5}}))
    made = stage(tiny_target, drafter=make_small("dspark"), confidence=0.4, prompts=2)
    record = made.run({**inputs, "export": tmp_path / "export"}, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    label = "in process, confidence 0.4"
    assert [(row["dataset"], row["engine"], row["num_speculative_tokens"]) for row in rows] == [
        ("heldout", "in_process", 3), ("heldout", label, 3), ("heldout/chat", "in_process", 3),
        ("heldout/maths", "in_process", 3)]
    row, accepted = rows[1], rows[1]["mean_accepted_length"] - 1
    assert row["confidence"] == 0.4 and 0 <= row["verified_tokens"] < row["num_speculative_tokens"]
    assert accepted == pytest.approx(sum(row["per_position_acceptance"]), abs=1e-3)
    assert row["acceptance_rate"] * row["verified_tokens"] == pytest.approx(accepted, abs=2e-3)
    assert record["lossless"] and record["accepted_length"] == rows[0]["mean_accepted_length"]


def judged(evaluate: Evaluate, heldout: int = 6, formats: tuple[str, ...] = ("speculators",)
           ) -> dict[str, str]:
    return evaluate.check({"prompts": Prompts(Jsonl("any"), None, heldout, 0.0, None, None, None),
                           "export": SimpleNamespace(formats=[*formats])})


def test_a_format_that_no_server_loads_is_measured_in_process_alone(tiny_target: Target) -> None:
    settings = {"drafter": make_small("mtp"), "format": "changes"}
    served = stage(tiny_target, **settings, server=small_server())
    said = ("must be a format that a server loads (stitched), but is changes, the trained tensors alone, "
            "which tools/apply_mtp.py puts into the target; set")
    assert judged(served, formats=("stitched", "changes")) == {
        "evaluate.format": f"{said} evaluate.format=stitched"}
    assert judged(served, formats=("changes",)) == {
        "evaluate.format": f"{said} export.formats=[stitched,changes] evaluate.format=stitched"}
    assert judged(stage(tiny_target, **settings), formats=("changes",)) == {}
    assert judged(replace(served, format="stitched"), formats=("stitched", "changes")) == {}


def test_settings_that_need_each_other(tiny_target: Target) -> None:
    assert judged(stage(tiny_target, k=[4, 1])) == {}
    longest = "must lie between 1 and 4, the longest draft with drafter.block_size=5, but is"
    assert judged(stage(tiny_target, k=[3, 5, 9])) == {
        f"evaluate.k.{place}": f"{longest} {k}" for place, k in ((1, 5), (2, 9))}
    assert judged(stage(tiny_target, format="native")) == {
        "evaluate.format": "must be one of export.formats (speculators), but is native"}
    assert list(judged(stage(tiny_target), heldout=0)) == ["prompts.heldout"]
    assert list(judged(stage(tiny_target, weights={"turns": {"first": 1}}))) == ["evaluate.weights.turns"]
    assert judged(stage(tiny_target, confidence=0.4)) == {
        "evaluate.confidence": "must be null, since this drafter does not say how likely its tokens are "
                               "accepted, but is 0.4"}
    assert judged(stage(tiny_target, drafter=make_small("dspark"), confidence=0.4)) == {}


def test_draft_lengths_that_the_server_refuses_are_told_before_it_is_started(tiny_target: Target,
                                                                              tmp_path: Path) -> None:
    other = copied(tiny_target, tmp_path / "other",
                   config={"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2})
    made = stage(other, drafter=make_small("mtp", start="own"), k=[2, 3, 4], server=small_server())
    with pytest.raises(UserError, match=r"^evaluate\.k\.1=3 must be at most 2 or a multiple of it"):
        made.preflight()
    replace(made, server=None).preflight()


def test_a_text_that_changes_with_the_drafter_stops_the_run(tiny_target: Target, inputs: dict[str, Path],
                                                            tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that does not forget rejected tokens, as a server with a wrong rewind."""
    monkeypatch.setattr("trainer.engines.transformers.TransformersSession.rewind", lambda self, length: None)
    with pytest.raises(GateFailed, match="gate in_process_lossless failed: .* must be <= 0"):
        stage(tiny_target).run(inputs, tmp_path)


def test_some_prompt_must_be_held_out(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    lines = (inputs["prompts"] / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("".join(line + "\n" for line in lines if '"train"' in line))
    with pytest.raises(UserError, match="no held-out prompt to evaluate on; raise prompts.heldout"):
        stage(tiny_target).run({**inputs, "prompts": tmp_path}, tmp_path)


def test_sampled_answers_are_refused_before_the_run(tiny_target: Target) -> None:
    others = {"export": SimpleNamespace(formats=["speculators"]), "prompts": SimpleNamespace(heldout=1)}
    found = stage(tiny_target, sampling=Sampling(12, 0.7, 1.0, 0)).check(others)
    assert list(found) == ["evaluate.sampling.temperature"] and "must be 0" in found.popitem()[1]
    assert stage(tiny_target).check(others) == {}


@pytest.fixture(scope="module")
def uneven_lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six held-out prompts, of which the second and the fifth are long."""
    folder = tmp_path_factory.mktemp("lengths")
    source = folder / "source.jsonl"
    rows = [{"id": f"p{number}", "turns": [f"{number}" + "x" * (200 if number in (1, 4) else 5)],
             "split": "heldout"} for number in range(6)]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, PROMPTS[-1]]))
    Prompts(Jsonl(str(source)), None, 6, 0.0, None, None, None).run({}, folder)
    return folder


def test_prompts_without_room_are_left_out_and_counted(tiny_target: Target, inputs: dict[str, Path],
                                                       uneven_lengths: Path, tmp_path: Path) -> None:
    made = stage(tiny_target, too_long="drop", engine=engine(max_length=150))
    record = made.run({**inputs, "prompts": uneven_lengths}, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["prompts"] for row in rows] == [4, 4] and record["prompts"] == 4
    assert (record["left_out"], record["left_out_ids"]) == (2, ["p1", "p4"])


@pytest.mark.parametrize(("changes", "said"), [
    ({}, r"held-out prompt p1 has 2\d\d tokens, .*max_new_tokens=12 within evaluate.engine.max_length=150 "
         r"\(2 of 6 are so long\); leave such prompts out with evaluate.too_long=drop, raise"),
    ({"server": small_server(max_model_len=140)}, "within engine.max_model_len=140 "),
    ({"server": small_server(max_model_len=160)}, "within evaluate.engine.max_length=150 "),
    ({"too_long": "drop", "engine": engine(max_length=30)}, r"p0 has .* \(6 of 6 are so long\); raise the")])
def test_prompts_without_room_are_refused_before_training(tiny_target: Target, uneven_lengths: Path,
                                                          changes: dict[str, Any], said: str) -> None:
    made = stage(tiny_target, **{"engine": engine(max_length=150), **changes})
    with pytest.raises(UserError, match=said):
        made.foresee({"prompts": uneven_lengths})


def test_prompts_that_were_trained_on_are_not_measured(tiny_target: Target, inputs: dict[str, Path],
                                                       tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Stored answers bring a split of their own; a later turn of a conversation gives the first one away."""
    made = stage(tiny_target, prompts=6)
    asked = made._questions(inputs)[0]
    some = [Sample(f"other {name}", (*ids, 5, 6, 7)[number:], (False,) * (len(ids) - number) + (True,) * 3)
            for number, (name, ids) in enumerate((each.id, each.ids) for each in asked[:2])]
    given = {**inputs, "responses": write_responses(tmp_path / "responses", some)}
    record = made.run(given, tmp_path)
    assert (record["trained_on"], record["trained_on_ids"], record["prompts"]) == (1, [asked[0].id], 5)
    assert f"1 held-out prompts were trained on and are left out ({asked[0].id})" in capsys.readouterr().out
    every = [Sample(each.id, (*each.ids, 5, 6), (False,) * len(each.ids) + (True, True)) for each in asked]
    with pytest.raises(UserError, match="all 6 held-out prompts were trained on, since responses=stored"):
        made.foresee({**inputs, "responses": write_responses(tmp_path / "responses", every)})
    made.foresee({**inputs, "responses": write_responses(tmp_path / "responses", every, heldout=6)})


def test_a_prompt_that_just_fits_is_measured(tiny_target: Target, inputs: dict[str, Path]) -> None:
    longest = max(len(each.ids) for each in stage(tiny_target)._questions(inputs)[0])
    stage(tiny_target, engine=engine(max_length=longest + 12)).foresee(inputs)
    with pytest.raises(UserError, match="leaves no room"):
        stage(tiny_target, engine=engine(max_length=longest + 11)).foresee(inputs)
    stage(tiny_target).foresee({})


def test_what_is_dropped_is_one_setting() -> None:
    def settings(*given: str) -> str:
        return compose_configuration(["recipe=smoke", *given], find()).settings["evaluate"]["too_long"]

    assert settings() == settings("responses=as_given") == "error"
    assert settings("responses.too_long=drop") == settings("evaluate.too_long=drop") == "drop"


def measured(accepted: int, drafts: int, tokens: int, tok_s: float) -> Measurement:
    counters = SpecCounters(drafts, 2 * drafts, accepted, (accepted, 0))
    length, rate, positions = acceptance(counters, 2)
    return Measurement([], tokens / tok_s, tokens, tok_s, counters, length, rate, positions)


@pytest.mark.parametrize(("accepted", "tokens", "speedup"), [
    (300, 1300, 1.2), (0, 1300, None), (40, 1300, None), (300, 499, None), (60, 500, 1.2), (0, 500, 0.95),
    (300, 500, 0.95), (0, 499, None)])
def test_a_speedup_is_claimed_of_accepted_drafts_and_enough_tokens(accepted: int, tokens: int,
                                                                   speedup: float | None) -> None:
    """A slow-down is told in any case, but for a server with interpreted kernels."""
    speed = 9.5 if speedup == 0.95 else 12.0
    pair = measured(0, 0, tokens, 10.0), measured(accepted, 1000, tokens, speed)
    row = served({}, 2, *pair, lossless=True, interpreted=False)
    assert row["speedup"] == speedup and (row["baseline_tok_s"], row["tok_s"]) == (10.0, speed)
    slow = served({}, 2, *pair, lossless=True, interpreted=True)
    assert slow == row | {"interpreted": True, "tok_s": None, "speedup": None}


def counted(*rates: float) -> dict[str, Any]:
    return {"num_speculative_tokens": len(rates), "per_position_acceptance": [*rates],
            "mean_accepted_length": 1 + sum(rates)}


def agreed(*pairs: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, float]:
    return {gate.name: gate.value for gate in agreement_gates([*pairs], 0.02) if gate.passed}


LENGTH, POSITIONS = "served_accepted_length_gap", "served_acceptance_by_position_gap"


def test_acceptance_at_other_positions_is_a_fault_though_the_length_is_the_same() -> None:
    """More at the first position, less at the second, by a longer draft than the first one."""
    fine, here = (counted(0.4), counted(0.4)), counted(0.4, 0.3, 0.1)
    assert agreed(fine, (here, here)) == {LENGTH: 0.0, POSITIONS: 0.0}
    moved = fine, (here, counted(0.47, 0.23, 0.1))
    assert agreed(*moved) == {LENGTH: pytest.approx(0.0)}
    [gate] = [gate for gate in agreement_gates([*moved], 0.02) if not gate.passed]
    assert gate.name == POSITIONS and gate.value == pytest.approx(1.47 / 1.40 - 1)
    assert "K=3, positions 1 to 1: 1.400 in process, 1.470 served" in gate.cause
    assert agreed((here, counted(0.4, 0.25, 0.1))) == {}, "a loss at a later position is a loss of length"


def test_a_position_that_is_hardly_reached_fires_no_gate() -> None:
    """One acceptance of 300 drafts instead of two, which is half of the rate."""
    assert agreed((counted(0.3, 0.05, 2 / 300), counted(0.3, 0.05, 1 / 300))).keys() == {LENGTH, POSITIONS}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=15))
def test_the_gate_by_position_holds_the_length_as_well(rates: list[tuple[float, float]]) -> None:
    here, there = (counted(*each) for each in zip(*rates, strict=True))
    length, positions = (gate.value for gate in agreement_gates([(here, there)], 0.02))
    assert positions >= length - 1e-12


def test_a_target_that_moved_since_the_export_is_named(tiny_target: Target, inputs: dict[str, Path],
                                                       tmp_path: Path) -> None:
    facts = {"method": "dflash", "max_k": 7, "target": str(tmp_path)}
    (tmp_path / "export.json").write_text(json.dumps(facts))
    stage(tiny_target).foresee({"export": tmp_path})
    (tmp_path / "export.json").write_text(json.dumps({**facts, "target": str(tmp_path / "gone")}))
    for call in (lambda: stage(tiny_target).foresee({"export": tmp_path}),
                 lambda: stage(tiny_target).run({**inputs, "export": tmp_path}, tmp_path)):
        with pytest.raises(UserError, match=f"names its target by the path {tmp_path}/gone, where nothing is "
                                            "any more; export again with export.target_name="):
            call()


TALKS = [{"id": f"{kind}{number}", "turns": [f"{kind} {number}?", "and?", "then?"][:1 + number],
          "category": kind, "language": language, "split": "heldout",
          **({}, {"system": "y" * 150}, {"chat_template_kwargs": {"enable_thinking": True}})[number]}
         for number in range(3) for kind, language in (("chat", "en"), ("code", "es"))]


@pytest.fixture(scope="module")
def talks(tiny_target: Target, inputs: dict[str, Path],
          tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversations of one, two and three turns, and what the target answered to all of them."""
    folder = tmp_path_factory.mktemp("talks")
    source = folder / "source.jsonl"
    rows = [*TALKS, {"turns": ["train", "on"], "id": "t"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("prompts", "responses"):
        (folder / name).mkdir()
    Prompts(Jsonl(str(source)), None, 6, 0.0, None, None, None).run({}, folder / "prompts")
    answering = regenerate(tiny_target, sampling=Sampling(8, 0.0, 1.0, 0))
    answering.run({"prompts": folder / "prompts"}, folder / "responses")
    return {**inputs, "prompts": folder / "prompts", "responses": folder / "responses"}


def test_every_slice_has_a_row(tiny_target: Target, talks: dict[str, Path], tmp_path: Path) -> None:
    weights = {"category": {"chat": 1}, "turn": {"first": 1, "third": 1}}
    record = stage(tiny_target, weights=weights, k=[3, 2]).run(talks, tmp_path)
    rows = {(row["dataset"], row["num_speculative_tokens"]): row
            for row in json.loads((tmp_path / "rows.json").read_text())}
    counted = {name: row["prompts"] for (name, _), row in rows.items()}
    assert counted == counted | {
        "heldout": 12, "heldout/chat": 6, "heldout/code": 6, "heldout/language=en": 6,
        "heldout/language=es": 6, "heldout/thinking=on": 6, "heldout/thinking=unknown": 6,
        "heldout/context=up_to_512": 12 - counted["heldout/context=up_to_128"],
        "heldout/turn=first": 6, "heldout/turn=second": 4, "heldout/turn=third": 2}
    assert len(counted) == 12 and counted["heldout/context=up_to_512"] >= 4
    for kind in ("language", "thinking", "context", "turn"):
        own = [row for (name, _), row in rows.items() if f"/{kind}=" in name]
        for figure in ("drafts", "output_tokens"):
            assert sum(row[figure] for row in own) == rows["heldout", 3][figure], kind
    assert {name for name, k in rows if k == 2} == {"heldout"}, "the first length is told by slice"
    same, other = (rows["heldout", k] for k in (3, 2))
    assert record["mix"] == same["mix"] >= 1 and "mix" not in other and record["prompts"] == 12


def test_a_later_turn_is_asked_as_the_server_was(tiny_target: Target, talks: dict[str, Path]) -> None:
    """Behind the target's own answers; of given ones, which lie in one row, behind those."""
    asked = {each.id: each.ids for each in stage(tiny_target)._questions(talks)[0]}
    rows = {row["id"]: row for row in read_rows(talks["responses"])}
    assert {name for name in asked if "#" in name} == {"chat1#1", "code1#1", "chat2#1", "chat2#2", "code2#1",
                                                       "code2#2"}
    for name in asked:
        assert asked[name] == rows[name if "#" in name else f"{name}#0"]["prompt"]
    assert {each.id for each in stage(tiny_target, turns="first")._questions(talks)[0]} == {
        each["id"] for each in TALKS}


def test_a_later_turn_of_given_answers(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(
        json.dumps({"turns": [name, "more"], "answers": ["x", "y"], "id": name, "split": split}) + "\n"
        for name, split in (("g", "heldout"), ("t", "train"))))
    for name in ("prompts", "responses"):
        (tmp_path / name).mkdir()
    Prompts(Jsonl(str(source)), None, 1, 0.0, None, None, None).run({}, tmp_path / "prompts")
    AsGiven(tiny_target, 300, None, None).run({"prompts": tmp_path / "prompts"}, tmp_path / "responses")
    made = {**inputs, "prompts": tmp_path / "prompts", "responses": tmp_path / "responses"}
    first, second = stage(tiny_target)._questions(made)[0]
    [row] = [row for row in read_rows(tmp_path / "responses") if row["split"] == "heldout"]
    assert second.id == "g#1" and second.slices["turn"] == "second"
    assert row["mask"][len(second.ids)] and not row["mask"][len(second.ids) - 1]
    assert second.ids == row["tokens"][:len(second.ids)] and len(second.ids) > len(first.ids)
    row["tokens"][0] += 1  # a conversation of another one's id
    (tmp_path / "responses/responses.jsonl").write_text(json.dumps(row) + "\n")
    assert [each.id for each in stage(tiny_target)._questions(made)[0]] == ["g"]


def test_later_turns_without_room_are_left_out_and_counted(tiny_target: Target,
                                                           talks: dict[str, Path]) -> None:
    longest = max(len(each.ids) for each in stage(tiny_target)._questions(talks)[0])
    made = stage(tiny_target, engine=engine(max_length=longest + 11))
    chosen, left_out, _ = made._questions(talks)
    assert left_out and all("#" in name for name in left_out) and len(chosen) + len(left_out) == 12


@pytest.mark.parametrize(("weights", "said"), [
    ({"category": {"chat": 1, "coed": 1}}, r"^evaluate\.weights .*weighs the category 'coed', .*; nearest: "
                                           r"code \(there: chat, code\)"),
    ({"thinking": {"off": 1}}, r"weighs the thinking 'off', but no held-out answer is of it \(there: on, u")])
def test_unknown_slices_are_told_before_there_are_answers(tiny_target: Target, talks: dict[str, Path],
                                                          weights: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        stage(tiny_target, weights=weights).foresee({"prompts": talks["prompts"]})


def test_slices_that_answers_alone_have_are_judged_with_them(tiny_target: Target,
                                                             talks: dict[str, Path]) -> None:
    made = stage(tiny_target, weights={"turn": {"later": 1}})
    made.foresee({"prompts": talks["prompts"]})
    with pytest.raises(UserError, match=r"weighs the turn 'later', .* \(there: first, second, third\)"):
        made.foresee({"prompts": talks["prompts"], "responses": talks["responses"]})


def test_some_prompts_stand_for_all(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    stage(tiny_target, prompts=2).run(inputs, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["dataset"], row["prompts"]) for row in rows] == [
        ("heldout", 2), ("heldout/chat", 1), ("heldout/maths", 1)]
