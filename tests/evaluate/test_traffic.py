"""Rows to recommendations: classes of traffic, schedules that vLLM takes, every doubt on rows made for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.evaluate.traffic import drafter_of, read_rows, tune, usable
from trainer.evaluate.tuning_table import print_tuning

PUBLISHED = Path(__file__).with_name("published_sweeps.json")


def row(k: int, *, intercept: float = 1.1, slope: float = 0.15, keep: float = 0.8, **changes: Any) -> dict:
    rates = [round(keep ** place, 3) for place in range(1, k + 1)]
    length = 1 + sum(rates)
    gain = length / (intercept + slope * k)
    return {"model": "org/target", "method": "dflash", "dataset": "chat", "users": 1, "temperature": 0.0,
            "baseline_tok_s": 100.0, "tok_s": 100 * gain, "speedup": round(gain, 3), "lossless": True,
            "num_speculative_tokens": k, "mean_accepted_length": length,
            "acceptance_rate": sum(rates) / k, "per_position_acceptance": rates, **changes}


def sweep(**changes: Any) -> list[dict]:
    return [row(k, **changes) for k in (1, 3, 5, 7)]


def one(rows: list[dict]) -> dict[str, Any]:
    [found] = tune(rows)["drafters"]
    return found


def said(found: dict[str, Any]) -> str:
    return " | ".join([*found["doubts"], *(doubt["text"] for own in found["classes"]
                                           for doubt in own["doubts"])])


def test_a_sound_sweep_raises_no_doubt() -> None:
    found = one(sweep())
    assert found["speculate"] and said(found) == ""
    [own] = found["classes"]
    assert own["measured_k"] == [1, 3, 5, 7] and own["k"] == found["default_k"]
    assert own["round_cost"]["intercept"] == pytest.approx(1.1, abs=0.03)
    assert own["expected"][0] == {"k": 0, "accepted_length": 1.0, "speedup": 1.0, "low": 1.0, "high": 1.0,
                                  "measured": True}
    assert [each["k"] for each in own["expected"] if each["measured"]] == [0, 1, 3, 5, 7]
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 1, found["default_k"]]]


def test_each_class_has_its_own_length_and_the_batch_its_schedule() -> None:
    """A busy server verifies at a price: long drafts for one user, short ones for four, none for 32."""
    loads = {1: 0.05, 4: 0.35, 32: 1.2}
    rows = [each for users, slope in loads.items() for dataset, keep in (("chat", 0.6), ("code", 0.7))
            for each in sweep(users=users, slope=slope, dataset=dataset, keep=keep)]
    found = one(rows)
    by_load = {users: [own["k"] for own in found["classes"] if own["users"] == users] for users in loads}
    assert min(by_load[1]) > max(by_load[4]) > 0 and by_load[32] == [0, 0]
    assert all(own["speculate"] == bool(own["k"]) for own in found["classes"])
    schedule = found["num_speculative_tokens_per_batch_size"]
    assert schedule[0][0] == 1 and schedule[-1][1] == 32 and schedule[-1][2] == 0
    assert [first for first, _, _ in schedule[1:]] == [last + 1 for _, last, _ in schedule[:-1]]
    lengths = [k for _, _, k in schedule]
    assert lengths == sorted(set(lengths), reverse=True) and len(lengths) > 2
    assert found["speculate"] and found["default_k"] >= 1 and found["speedup"] > 1


def test_a_mean_below_one_still_leaves_small_batches_their_drafts() -> None:
    found = one(sweep(users=1, slope=0.3) + sweep(users=64, slope=4.0))
    assert found["speculate"] and found["speedup"] > 1
    assert found["num_speculative_tokens_per_batch_size"][-1][2] == 0
    assert found["default_k"] == found["num_speculative_tokens_per_batch_size"][0][2]
    assert "serve with the schedule" in said(found)


def test_plain_decoding_is_recommended_where_it_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    tuning = tune(sweep(intercept=1.4, slope=0.8, keep=0.5))
    [found] = tuning["drafters"]
    assert (found["speculate"], found["default_k"], found["speedup"]) == (False, None, 1.0)
    assert found["num_speculative_tokens_per_batch_size"] is None
    print_tuning(tuning)
    assert "dflash for org/target: do not speculate" in capsys.readouterr().out


def test_a_drafter_of_whole_blocks_has_one_length() -> None:
    """Which its rows say: nothing else is recommended, and no other one asked for."""
    found = one([row(7, slope=0.05, possible_k=[7], users=users) for users in (1, 8)])
    assert found["default_k"] == 7 and said(found) == ""
    assert {each["k"] for own in found["classes"] for each in own["expected"]} == {0, 7}
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 8, 7]]
    slow = one([row(7, slope=0.9, possible_k=[7])])
    assert not slow["speculate"] and said(slow) == ""


def test_rows_without_users_give_a_length_and_no_schedule() -> None:
    rows = sweep()
    for each in rows:
        del each["users"], each["temperature"]
    found = one(rows)
    assert found["default_k"] and found["num_speculative_tokens_per_batch_size"] is None


def test_repeats_are_averaged_and_acceptance_is_shared_between_loads() -> None:
    [own] = one([row(3, tok_s=150.0), row(3, tok_s=96.0), row(1)])["classes"]
    assert own["expected"][3]["speedup"] == pytest.approx(1.2)
    busy = one([*sweep(keep=0.6), row(1, users=8, keep=0.6)])["classes"][1]
    assert busy["measured_k"] == [1]
    assert busy["expected"][7]["accepted_length"] == pytest.approx(1 + sum(0.6 ** i for i in range(1, 8)),
                                                                   abs=0.01)


@pytest.mark.parametrize(("rows", "words"), [
    (sweep(intercept=3.0), "costs 3.0"),
    (sweep(intercept=3.0), "does not batch the queries of a request"),
    ([row(3)], "only K = 3 was measured"),
    ([row(1), row(3, tok_s=70.0), row(5), row(7)], "a round of K = 3 costs"),
    ([row(1), row(4, per_position_acceptance=[0.6] * 4, mean_accepted_length=3.4)],
     "returns the same output for all positions; K + 1 = 5 is no power of two"),
    ([row(1), row(4, per_position_acceptance=[0.6] * 4, mean_accepted_length=3.4)], "try K = 3"),
    ([row(1), row(3, per_position_acceptance=[0.6] * 3, mean_accepted_length=2.8)], "stays at 0.60"),
    ([row(1), row(4, per_position_acceptance=[0.5, 0.6, 0.3, 0.2], mean_accepted_length=2.6)],
     "acceptance rises by 0.100"),
    (sweep(lossless=False), "text with the drafter differs"),
    ([row(k, attention_backend="ROCM_AITER_MLA") for k in (1, 3, 5)],
     "ROCM_AITER_MLA is known to verify wrongly where K + 1 is no power of two"),
])
def test_every_doubt_is_named(rows: list[dict], words: str) -> None:
    assert words in said(one(rows))


def test_a_flat_curve_of_even_queries_does_not_blame_their_number() -> None:
    assert "power of two" not in said(one([row(3, per_position_acceptance=[0.6] * 3,
                                               mean_accepted_length=2.8), row(1)]))


def test_a_backend_that_needs_even_queries_gets_them() -> None:
    found = one([row(k, slope=0.05, attention_backend="ROCM_AITER_MLA") for k in (1, 3, 5, 6)])
    assert found["default_k"] == 3 and [each["k"] for each in found["classes"][0]["expected"]] == [0, 1, 3]
    assert one([row(k, slope=0.05, attention_backend="TRITON_ATTN") for k in (1, 3, 5, 6)])["default_k"] > 3


def test_published_rows_name_the_server_and_no_drafter() -> None:
    """The slow start of a round is said of exactly those series whose intercept is far above 1, however the
    published figures are rounded; no row of them is called flat or rising."""
    drafters = tune(read_rows(PUBLISHED))["drafters"]
    assert all(each["doubts"] == [] for each in drafters)
    named = {(each["model"], each["method"]) for each in drafters for own in each["classes"]
             if any(doubt["kind"] == "intercept" for doubt in own["doubts"])}
    assert {("Qwen/Qwen3-8B", method) for method in ("EAGLE-3", "DFlash", "DSpark")} <= named
    assert not any("gemma-4-26B" in model or method == "Gemma 4 MTP" for model, method in named)
    by_name = {(each["model"], each["method"]): each for each in drafters}
    own = {each["dataset"]: each for each in by_name["Qwen/Qwen3-8B", "EAGLE-3"]["classes"]}
    assert not own["MATH500"]["speculate"] and own["GSM8K"]["speculate"]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"baseline_tok_s": None}, "no plain speed"), ({"tok_s": None}, "no drafted speed"),
    ({"speedup": None}, "too few tokens"), ({"per_position_acceptance": []}, "no acceptance by position"),
    ({"engine": "in_process"}, "in process"), ({"num_speculative_tokens": 0}, "no draft length"),
])
def test_rows_that_say_nothing_of_speed_are_counted(changes: dict[str, Any], reason: str) -> None:
    tuning = tune([*sweep(), row(2, **changes)])
    assert list(tuning["left_out"].values()) == [1] and reason in next(iter(tuning["left_out"]))
    with pytest.raises(UserError, match=f"says what a draft length costs .*{reason}"):
        tune([row(2, **changes)])


@pytest.mark.parametrize(("changes", "words"), [
    ({"tok_s": "fast"}, "row 0: tok_s is 'fast'"), ({"tok_s": float("nan")}, "tok_s is nan"),
    ({"dataset": None}, "dataset is None, expected a name"), ({"temperature": "low"}, "temperature is 'low'"),
    ({"users": "4"}, "users is '4', expected a count"),
    ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
    ({"mean_accepted_length": 0.4}, "mean_accepted_length is 0.4, expected 1 to K"),
    ({"per_position_acceptance": [0.5, 1.2]}, "expected K = 2 shares"),
    ({"per_position_acceptance": [0.5]}, "expected K = 2 shares"),
])
def test_a_broken_row_is_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        usable([row(2, **changes)])


def test_files_and_methods_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text, words in (("", "cannot be read"), ('{"a": 1}', "no list of rows"), ("[1]", "no list of rows")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_rows(path)
    with pytest.raises(UserError, match="No such file"):
        read_rows(tmp_path / "none.json")
    path.write_text(json.dumps({"rows": sweep()}))
    tuning = tune(read_rows(path), lambda method, longest: [1, 2, 3])
    assert drafter_of(tuning, "dflash")["default_k"] <= 3
    assert "K = 5, 7 was measured" in said(tuning["drafters"][0])
    with pytest.raises(UserError, match="no drafter of the method 'eagle3'.*dflash of org/target"):
        drafter_of(tuning, "eagle3")


@settings(max_examples=50)
@given(st.dictionaries(st.integers(1, 60), st.floats(0.02, 2.0), min_size=1, max_size=4))
def test_any_schedule_covers_its_batches_once(loads: dict[int, float]) -> None:
    found = one([each for users, slope in loads.items() for each in sweep(users=users, slope=slope)])
    schedule = found["num_speculative_tokens_per_batch_size"]
    if schedule is None:
        assert not found["speculate"]
        return
    covered = [batch for first, last, _ in schedule for batch in range(first, last + 1)]
    assert covered == list(range(1, max(loads) + 1))
    assert all(0 <= k <= 7 for _, _, k in schedule) and any(k for _, _, k in schedule)
    assert found["default_k"] >= 1


@pytest.mark.vllm
def test_vllm_reads_the_schedule() -> None:
    """By vLLM's own lookup, whose file imports nothing: each batch gets the K that the tuner means."""
    from vllm_support import vllm_python

    rows = [each for users, slope in {1: 0.05, 4: 0.35, 32: 1.2}.items()
            for each in sweep(users=users, slope=slope, keep=0.6)]
    schedule = one(rows)["num_speculative_tokens_per_batch_size"]
    program = """if True:
        import importlib.util, json, runpy, sys
        package = importlib.util.find_spec("vllm").submodule_search_locations[0]
        read = runpy.run_path(package + "/v1/spec_decode/dynamic/utils.py")
        schedule, longest = json.loads(sys.argv[1])
        print(read["build_dynamic_sd_schedule_lookup"](schedule, 40, longest))"""
    longest = max(k for _, _, k in schedule)
    done = subprocess.run([vllm_python(), "-c", program, json.dumps([schedule, longest])],
                          capture_output=True, text=True, check=True)
    lookup = json.loads(done.stdout)
    expected = {batch: k for first, last, k in schedule for batch in range(first, last + 1)}
    assert lookup[1:33] == [expected[batch] for batch in range(1, 33)]
    assert lookup[33:] == [schedule[-1][2]] * 8  # larger batches keep the last
