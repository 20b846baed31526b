"""A training run that is stopped and called again ends with the same bits as one that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    OFFLINE,
    dflash,
    make_dflash,
    make_small,
    objective,
    random_samples,
    write_responses,
)
from trainings import CONF, SAMPLES, Stopped, check_equal, log_of, run, stage

from trainer.errors import UserError
from trainer.export.formats import FORMATS, Serving
from trainer.records import Sample
from trainer.strategies.single import Single
from trainer.target import Target
from trainer.training.build import load_trained
from trainer.training.rows import Rows
from trainer.training.stage import TrainRuntime


@pytest.mark.parametrize(("changes", "said"), [
    ({"optimizer": partial(torch.optim.AdamW, lr=-1.0)}, "step on cpu .*rate: -1.*; mend optimizer"),
    ({"optimizer": partial(torch.optim.AdamW, capturable=True)}, "; mend optimizer.capturable"),
    ({"optimizer": partial(torch.optim.AdamW, lr=1e38)}, r"step on cpu .*; mend optimizer.lr=1e\+38$"),
    ({"optimizer": partial(torch.optim.AdamW, lr=0.0)}, "moves nothing with optimizer.lr=0.0 and"),
    ({"clip": 1e-300}, "moves nothing with optimizer.lr=0.003 and train.clip=1e-300, so .* raise"),
    ({"drafter": make_dflash(attention="flex")}, "drafter.attention=flex has no backward pass"),
    ({"drafter": make_dflash(draft_vocab_size=321)}, "draft_vocab_size=321 must lie between 3, as 2 special"),
    ({"drafter": make_dflash(start_layers=[0, 3])}, "start_layers names layer 3, but tiny has 3 layers"),
    ({"runtime": TrainRuntime("cuda:99", 1, Single(), 1, 1, 1, None)},
     "train.runtime.device=cuda:99, but PyTorch finds")])
def test_what_cannot_be_trained_is_said_before_any_stage_runs(target: Target, changes: dict[str, Any],
                                                              said: str) -> None:
    stage(target).preflight()
    with pytest.raises(UserError, match=said):
        replace(stage(target), **changes).preflight()
    with pytest.raises(UserError, match="target.mask_token 'none' is not one of"):
        stage(replace(target, mask_token="none")).preflight()


def test_settings_of_the_drafter_are_judged_together(target: Target) -> None:
    def judged(last_rows: str = "none", **settings: Any) -> list[str]:
        stored = SimpleNamespace(tap_layers=[1, 2], last_rows=last_rows)
        return list(stage(target, drafter=make_dflash(**settings)).check({"hidden_states": stored}))

    assert judged() == judged(objective="kl", last_rows="all") == judged(tap_layers=[2]) == []
    assert judged(start_layers=[0]) == ["train.drafter.start_layers"]
    assert judged(tap_layers=[0, 2]) == ["train.drafter.tap_layers"]
    assert judged(objective="kl") == ["hidden_states.last_rows"]


@pytest.mark.parametrize(("name", "settings", "rows", "told"), [
    ("dflash", {"block_size": 120}, {}, []), ("dflash", {"block_size": 121}, {}, ["block_size"]),
    ("eagle3", {"steps": 120}, {}, ["steps"]), ("eagle3", {"steps": 119, "anchors": None}, {}, []),
    ("eagle3", {"steps": 512}, {"tokens": 1024}, ["steps"]), ("mtp", {"steps": 120}, {}, ["steps"]),
    ("dspark", {"block_size": 100_000, "anchors": 121}, {}, ["anchors", "block_size"])])
def test_what_no_row_or_text_can_hold_is_told(target: Target, name: str, settings: dict[str, Any],
                                              rows: dict[str, int], told: list[str]) -> None:
    """Rows have 120 tokens, texts up to 512."""
    made = stage(target, drafter=make_small(name, **settings), **rows)
    found = made.check({"hidden_states": SimpleNamespace(tap_layers=[1, 2, 3], last_rows="all")})
    assert sorted(found) == [f"train.drafter.{each}" for each in told]
    assert all("train.tokens=" in text for text in found.values())


def test_a_last_step_that_was_too_large_is_not_kept(target: Target, inputs: dict[str, Path],
                                                    tmp_path: Path) -> None:
    made = replace(stage(target, steps=1), optimizer=partial(torch.optim.AdamW, lr=1e15))
    with pytest.raises(UserError, match="not finite after the last step; lower optimizer.lr"):
        run(made, inputs, tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/weights.safetensors"))


def test_what_training_begins_with_decides_its_fingerprint(target: Target, tmp_path: Path) -> None:
    drafter = dflash(target, layers=1)
    FORMATS["native"].write(tmp_path, drafter.export(), Serving("t", [], 2), torch.float32)
    begun = stage(target, drafter=make_dflash(layers=1, start_from=str(tmp_path)))
    begun.preflight()
    assert begun.external().items() > stage(target).external().items()
    with pytest.raises(UserError, match="its num_hidden_layers is 1, and here it is 2; set drafter.layers"):
        stage(target, drafter=make_dflash(layers=2, start_from=str(tmp_path))).preflight()
    with pytest.raises(UserError, match="drafter.start_from=/none is no folder of an exported drafter"):
        stage(target, drafter=make_dflash(start_from="/none")).external()


def test_a_mask_token_with_a_meaning_is_told_before_training(target: Target, tmp_path: Path) -> None:
    said = Sample("s", (5, 6, *[target.mask_token_id] * 12), (False, *[True] * 13))
    with pytest.raises(UserError, match="is a token that tiny says: 12 of the 13 supervised tokens"):
        stage(target).foresee({"responses": write_responses(tmp_path, [said])})


@pytest.mark.parametrize("optimizer", sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml")))
def test_stopped_again_and_again_it_ends_with_the_same_bits(target: Target, inputs: dict[str, Path],
                                                            tmp_path: Path,
                                                            optimizer: str) -> None:
    record = run(stage(target, optimizer), inputs, tmp_path / "whole")
    assert record["steps"] == 13 and record["samples"] == 11
    stops = 0
    while stops < 20:
        Stopped.left = 28
        try:
            again = run(stage(target, optimizer, source=Stopped), inputs, tmp_path / "parts")
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 3
    check_equal(tmp_path / "whole", tmp_path / "parts")
    ignored = ("train_seconds", "final")
    assert {key: again[key] for key in again if key not in ignored} == \
        {key: record[key] for key in record if key not in ignored}
    assert [line["step"] for line in log_of(tmp_path / "parts")] == [2, 4, 5, 6, 8, 10, 12, 13]
    assert {path.name
            for path in (tmp_path / "parts/checkpoints").iterdir()} == {"step_000012", "step_000013"}


WORKER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from trainings import run, stage
from trainer.target import Folder, Target
import torch
torch.set_num_threads(1)
target = Target("tiny", Folder({folder!r}), "<|mask|>", [1, 2], {{}}, 512, False)
run(stage(target), {{name: Path(path) for name, path in {inputs!r}.items()}}, Path({out!r}))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_goes_on_with_the_same_bits(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                                     sign: signal.Signals) -> None:
    run(stage(target), inputs, tmp_path / "whole")
    out = tmp_path / "parts"
    out.mkdir()
    paths = [str(CONF.parent), str(CONF.parent / "tests"), str(Path(__file__).parent)]
    code = WORKER.format(paths=paths, folder=str(target.folder), out=str(out),
                         inputs={name: str(path) for name, path in inputs.items()})
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE) as process:
        wait_for(lambda: (out / "checkpoints/step_000003").exists() or process.poll() is not None)
        process.send_signal(sign)
        process.wait(60)
        assert process.returncode == -sign, process.stderr.read().decode()
    assert not (out / "weights.safetensors").exists(), "it was stopped in the middle"
    run(stage(target), inputs, out)
    check_equal(tmp_path / "whole", out)


def wait_for(done: Callable[[], bool], seconds: float = 120) -> None:
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < seconds, "nothing happened"
        time.sleep(0.005)


def test_a_run_that_only_lacks_its_end_is_finished(target: Target, inputs: dict[str, Path],
                                                   tmp_path: Path) -> None:
    """Killed after the last checkpoint and before the weights: nothing is trained again."""
    record = run(stage(target), inputs, tmp_path / "whole")
    (tmp_path / "whole/weights.safetensors").rename(tmp_path / "kept.safetensors")
    Stopped.left = 0
    again = run(stage(target, source=Stopped), inputs, tmp_path / "whole")
    assert again["final"] == record["final"] and again["tokens"] == record["tokens"]
    made, kept = tmp_path / "whole/weights.safetensors", tmp_path / "kept.safetensors"
    assert made.read_bytes() == kept.read_bytes()


def damaged(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data[:-100] if kind == "cut" else data)
    if kind == "gone":
        path.unlink()


@pytest.mark.parametrize(("kind", "name"), [("flipped", "weights.safetensors"), ("gone", "state.json"),
                                            ("cut", "optimizer.safetensors")])
def test_damaged_checkpoints_and_a_torn_log_change_nothing(target: Target, inputs: dict[str, Path],
                                                           tmp_path: Path, kind: str, name: str,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """The newest one first, then all: training takes the steps again, to the same bits."""
    run(stage(target), inputs, tmp_path / "whole")
    for steps in ("step_000009",), ("step_000006", "step_000009"):
        Stopped.left, out = 60, tmp_path / str(len(steps))
        with pytest.raises(KeyboardInterrupt):
            run(stage(target, source=Stopped), inputs, out)
        found = sorted(path.name for path in (out / "checkpoints").iterdir())
        assert found == ["step_000006", "step_000009"]
        for step in steps:
            damaged(out / "checkpoints" / step / name, kind)
        (out / "log.jsonl").write_text((out / "log.jsonl").read_text()[:-30])
        capsys.readouterr()
        run(stage(target), inputs, out)
        said = capsys.readouterr().out
        assert all(str(out / "checkpoints" / step / name) in said for step in steps)
        assert ("going on after step 6 of 13" in said) == (len(steps) == 1)
        check_equal(tmp_path / "whole", out)


def test_training_learns_and_measures_held_out_samples(target: Target, inputs: dict[str, Path],
                                                       tmp_path: Path) -> None:
    record = run(stage(target, steps=120, heldout_every=60), inputs, tmp_path / "out")
    lines = log_of(tmp_path / "out")
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert [line["step"] for line in lines if "heldout_loss" in line] == [60, 120]
    assert record["max_k"] == 4 and record["supervised"] == sum(sample.supervised for sample in SAMPLES[:11])
    drafter = load_trained(make_dflash(anchors=16, layers=1), target, tmp_path / "out")
    weights = load_file(tmp_path / "out/weights.safetensors")
    assert all(torch.equal(value, weights[name]) and not value.requires_grad
               for name, value in drafter.named_parameters())


def test_rows_are_a_function_of_their_number(target: Target, inputs: dict[str, Path]) -> None:
    source = OFFLINE(inputs["hidden_states"], [1, 2])
    one, two = (Rows(SAMPLES, source, 120, 5, "cpu") for _ in range(2))
    late = [two.row(number) for number in (9, 2, 0)]
    for number, other in zip((9, 2, 0), late, strict=True):
        batch = one.row(number)
        assert torch.equal(batch.tokens, other.tokens) and torch.equal(batch.taps, other.taps)
        assert batch.seed == other.seed and len(batch.tokens) == 120
    assert len({one.row(number).seed for number in range(12)}) == 12
    first = one.count(1)
    assert one.count(2) > first and sum(int((one.row(number).document >= 0).sum())
                                        for number in range(first)) == \
        sum(len(sample.tokens) for sample in SAMPLES)
    assert Rows(SAMPLES, source, 120, 6, "cpu").row(0).seed != one.row(0).seed


def test_a_step_has_the_same_rows_however_many_share_it(target: Target, inputs: dict[str, Path]) -> None:
    source = OFFLINE(inputs["hidden_states"], [1, 2])
    rows = Rows(SAMPLES, source, 60, 5, "cpu")
    for step in range(5):
        whole = list(range(4 * step, 4 * step + 4))
        assert rows.dealt(step, 4, 1) == [whole]
        for shares in (2, 4):
            found = rows.dealt(step, 4, shares)
            assert sorted(number for share in found for number in share) == whole
            assert {len(share) for share in found} == {4 // shares}
    loads = [[sum(map(rows.load, share)) for share in rows.dealt(step, 4, 2)] for step in range(5)]
    halves = [[sum(rows.load(4 * step + number) for number in part) for part in ((0, 2), (1, 3))]
              for step in range(5)]
    assert all(sum(one) == sum(other) for one, other in zip(loads, halves, strict=True))
    assert sum(abs(one - other) for one, other in loads) < sum(abs(one - other) for one, other in halves)


def test_how_full_rows_are_is_told_and_recorded(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    record = run(stage(target, steps=6), inputs, tmp_path / "out")
    ordered = sorted(SAMPLES[:11], key=lambda sample: sample.id)
    rows = Rows(ordered, OFFLINE(inputs["hidden_states"], [1, 2]), 120, 1, "cpu")
    count = rows.count(1)
    real = sum(int((rows.row(number).document >= 0).sum()) for number in range(count))
    assert record["rows_an_epoch"] == count and record["padding"] == round(1 - real / (120 * count), 4)
    assert (f"train: 11 samples in {count} rows of 120 tokens an epoch, {record['padding']:.1%} of them "
            "padding\n") in capsys.readouterr().out
    for step, line in zip((2, 4), log_of(tmp_path / "out"), strict=False):
        filled = sum(rows.load(number) for number in range(2 * step - 4, 2 * step))
        assert (line["step"], line["padding"]) == (step, round(1 - filled / 480, 4))
    facts, said = rows.told(2, 2)
    assert facts["uneven"] >= 0 and f"the fullest has {facts['uneven']:.1%} more than its share" in said


@pytest.mark.parametrize(("changes", "said"), [
    ({"drafter": make_dflash(tap_layers=[0, 2])},
     r"the drafter reads layers \[0, 2\] .* hold layers \[1, 2\]"),
    ({"tokens": 40}, "sample s4 has 52 tokens but train.tokens=40"),
    ({"epochs": 1, "steps": None, "accumulate": 50},
     "train.epochs=1 gives .* fewer than train.accumulate=50"),
    ({"drafter": make_dflash(anchors=16, objective=objective("ce", gamma=float("nan")))},
     "is not finite at step 1")])
def test_what_cannot_be_trained_is_said(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                        changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(stage(target, **changes), inputs, tmp_path / "out")


def test_samples_without_an_answer_are_left_out(target: Target, inputs: dict[str, Path],
                                                tmp_path: Path) -> None:
    """One supervised token has nothing to predict it from; without any other sample there is nothing to
    learn."""
    short = [Sample(f"e{number}", (5, 6, 7, 258), (False, False, False, True)) for number in range(3)]
    responses = write_responses(tmp_path / "some", [*SAMPLES[:4], *short])
    record = run(stage(target, steps=1), {**inputs, "responses": responses}, tmp_path / "out")
    assert record["samples"] == 4 and record["left_out"] == 3
    nothing = write_responses(tmp_path / "none", short)
    with pytest.raises(UserError, match="none of the 3 training samples has two supervised tokens"):
        run(stage(target), {**inputs, "responses": nothing}, tmp_path / "never")


def test_training_goes_on_without_held_out_samples(target: Target, inputs: dict[str, Path],
                                                   tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "responses", SAMPLES)
    record = run(stage(target, steps=2), {**inputs, "responses": responses}, tmp_path / "out")
    assert "heldout_loss" not in record["final"] and record["final"]["loss"] > 0


def test_a_held_out_sample_longer_than_a_row_is_told_before_the_first_step(target: Target,
                                                                           inputs: dict[str, Path],
                                                                           tmp_path: Path) -> None:
    """Before the hidden states are there, even."""
    longest = replace(random_samples((61,), seed=9)[0], id="held")
    responses = write_responses(tmp_path / "responses", [*SAMPLES[:4], longest], heldout=1)
    made = stage(target, tokens=60, heldout_every=1000)
    with pytest.raises(UserError, match="sample held has 61 tokens but train.tokens=60"):
        made.foresee({"responses": responses})
    with pytest.raises(UserError, match="sample held has 61 tokens"):
        run(made, {**inputs, "responses": responses}, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    stage(target, tokens=61).foresee({"responses": responses})
    made.foresee({})


def test_a_compile_is_announced(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **settings: None)
    run(stage(target, compile=True, steps=2), inputs, tmp_path / "out")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train: ")]
    assert lines[0].startswith("train: 11 samples in ") and "compiling the drafter" in lines[1]
    assert lines[2].startswith("train: 2/2 steps")
    run(stage(target, steps=2), inputs, tmp_path / "other")
    assert "compiling" not in capsys.readouterr().out
