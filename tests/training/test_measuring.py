"""The best step by measured acceptance is what a run leaves, also one that was stopped and went on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import acceptance, make_dflash, write_responses
from trainings import SAMPLES, Stopped, check_equal, log_of, run, stage

from trainer._stage_record import fingerprint
from trainer.architectures.base import Exported
from trainer.architectures.dflash import DFlash
from trainer.errors import GateFailed, UserError
from trainer.gates import Gate
from trainer.target import Target
from trainer.training.measuring import Measured, Measuring
from trainer.training.stage import Train


class Told(Measuring):
    """Says these lengths, one after the other; one below 0 is a gap."""

    def __init__(self, *lengths: float) -> None:
        self.lengths = [*lengths]

    def check(self, make: Any) -> dict[str, str]:
        return {}

    def preflight(self) -> None:
        return

    def due(self, step: int, steps: int) -> bool:
        return step % 3 == 0 or step == steps

    def usable(self, samples: Any) -> list[Any]:
        return samples[:2]

    def measure(self, *given: Any) -> Measured:
        length = self.lengths.pop(0)
        gap = 0.0 if length > 0 else 0.3
        return Measured(length, 1.5, -gap, 0.01, 1.4, 1.6, 0.14, 0.1, 2,
                        [Gate("measured_acceptance_gap", gap, 0.1, "<=", "the test says so")])


class Mixed(Told):
    """Says them of a mix; over all prompts the first is best. Asks for three held-out samples."""

    first = 3.0

    def measure(self, *given: Any) -> Measured:
        found = replace(super().measure(), slices={"chat": 1.5, "language=es": 1.25})
        self.first -= 0.1
        return replace(found, mix=found.measured, measured=self.first)

    def require(self, heldout: Any) -> None:
        if len(heldout) != 3:
            raise UserError("there are not three")


@pytest.mark.parametrize(("lengths", "best"), [((1.1, 1.6, 1.3, 1.2, 1.5), 6), ((1.3, 1.2, 1.3, 1.1, 1.0), 9),
                                               ((1.1, 1.2, 1.3, 1.4, 1.5), 13)])
def test_the_best_step_is_kept_and_taken(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                         lengths: tuple[float, ...], best: int,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Measured after steps 3, 6, 9, 12 and 13; of equal ones the later counts, and what was there before the
    first never does, though it accepts more. Two checkpoints are kept beside."""
    record = run(stage(target, acceptance=Told(1.9, *lengths)), inputs, tmp_path / "out")
    assert (record["best_step"], record["accepted_length"]) == (best, max(lengths))
    assert record["before_training"] == 1.9
    assert record["gates"]["measured_acceptance_gap"]["passed"]
    folders = {path.name for path in (tmp_path / "out/checkpoints").iterdir()}
    assert folders == {"step_000012", "step_000013", f"step_{best:06d}"}
    kept, left = (load_file(tmp_path / "out" / folder / "weights.safetensors")
                  for folder in (f"checkpoints/step_{best:06d}", "."))
    assert all(torch.equal(kept[name], left[name]) for name in kept)
    assert (f"step {best} is taken, not the last" in capsys.readouterr().out) == (best != 13)
    assert [line["measured"] for line in log_of(tmp_path / "out") if "measured" in line] == [1.9, *lengths]


def test_the_best_step_is_that_of_the_mix(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    """It is told with what all prompts accept; the log has every slice."""
    made = stage(target, acceptance=Mixed(1.15, 1.1, 1.3, 1.6, 1.2, 1.5))
    record = run(made, inputs, tmp_path / "out")
    assert (record["best_step"], record["mix"], record["mix_before"]) == (9, 1.6, 1.15)
    assert (record["accepted_length"], record["before_training"]) == (2.6, 2.9)
    printed = capsys.readouterr().out
    assert "as it was measured best (accepted length of the mix 1.600, of all prompts 2.600)" in printed
    assert "; by slice: chat 1.50, language=es 1.25; mix 1.600" in printed
    lines = [line for line in log_of(tmp_path / "out") if "measured" in line]
    assert [line["mix"] for line in lines] == [1.15, 1.1, 1.3, 1.6, 1.2, 1.5]
    assert all((line["measured/chat"], line["measured/language=es"]) == (1.5, 1.25) for line in lines)
    assert run(made, inputs, tmp_path / "out")["best_step"] == 9, "also from its checkpoints"


def test_what_measuring_asks_for_is_told_before_anything_is_made(target: Target, inputs: dict[str, Path],
                                                                  tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "responses", SAMPLES, heldout=2)
    with pytest.raises(UserError, match="there are not three"):
        stage(target, acceptance=Mixed()).foresee({"responses": responses})
    stage(target, acceptance=Mixed()).foresee(inputs)


def test_weights_make_a_training_of_their_own_and_none_leave_it_as_it_was(target: Target) -> None:
    node = {"acceptance": {"weights": {}, "every": 3}}
    plain, known = (fingerprint(each, 3, {}, {}, (), Train.neutral) for each in (
        {"acceptance": {"every": 3}}, node))
    other = fingerprint({"acceptance": {**node["acceptance"], "weights": {"turn": {"first": 1}}}}, 3, {}, {},
                        (), Train.neutral)
    assert plain == known != other


def test_measuring_changes_no_step(target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    """The same losses and, where the last step is the best, the same weights as without."""
    run(stage(target), inputs, tmp_path / "off")
    run(stage(target, acceptance=acceptance(6, prompts=2, max_new_tokens=8)), inputs, tmp_path / "on")
    last = tmp_path / "on/checkpoints/step_000013/weights.safetensors"
    one, two = load_file(tmp_path / "off/weights.safetensors"), load_file(last)
    assert all(torch.equal(one[name], two[name]) for name in one)
    off, on = ([(line["step"], line["loss"]) for line in log_of(tmp_path / name) if line["step"]]
               for name in ("off", "on"))
    assert off == on


def test_what_was_there_before_is_what_a_fresh_drafter_accepts(target: Target, inputs: dict[str, Path],
                                                               tmp_path: Path) -> None:
    """The same figure as of a run without a step that changes any draft; a gap of it stops nothing."""
    measured = acceptance(6, prompts=2, max_new_tokens=8)
    still = partial(torch.optim.AdamW, lr=1e-7, weight_decay=0.0)
    made = replace(stage(target, acceptance=measured, steps=1), optimizer=still)
    record = run(made, inputs, tmp_path / "still")
    assert record["before_training"] == record["accepted_length"]
    first = log_of(tmp_path / "still")[0]
    assert first["step"] == 0 and first["measured"] == record["before_training"] and "loss" not in first
    assert run(stage(target, acceptance=Told(-1.0, 1.2), steps=2), inputs, tmp_path / "gap")["best_step"] == 2


def test_stopped_again_and_again_it_ends_with_the_same_best_step(target: Target, inputs: dict[str, Path],
                                                                 tmp_path: Path) -> None:
    measured = {"acceptance": acceptance(5, prompts=2, max_new_tokens=8)}
    record = run(stage(target, **measured), inputs, tmp_path / "whole")
    stops = 0
    while stops < 30:
        Stopped.left = 55
        try:
            again = run(stage(target, source=Stopped, **measured), inputs, tmp_path / "parts")
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    check_equal(tmp_path / "whole", tmp_path / "parts")
    ignored = ("train_seconds", "final")
    assert {key: again[key] for key in again if key not in ignored} == \
        {key: record[key] for key in record if key not in ignored}
    assert record["best_step"] in (5, 10, 13)
    measured_at = [line["step"] for line in log_of(tmp_path / "whole") if "measured" in line]
    assert measured_at == [0, 5, 10, 13]
    assert not (tmp_path / "parts/measured").exists()


class Misled(DFlash):
    def export(self) -> Exported:
        found = super().export()
        found.flavours["speculators"]["aux_hidden_state_layer_ids"] = [2, 3]
        return found


def test_a_gap_stops_the_run_and_stands_in_the_log(target: Target, inputs: dict[str, Path],
                                                   tmp_path: Path) -> None:
    for lengths in (1.0, 1.1, 1.2, -1.0), (-1.0,):  # the same command again goes on, to the same end
        with pytest.raises(GateFailed, match="measured_acceptance_gap failed: 0.3, .*the test says so"):
            run(stage(target, acceptance=Told(*lengths)), inputs, tmp_path / "out")
        assert log_of(tmp_path / "out")[-1]["measured"] == -1.0
    assert not (tmp_path / "out/weights.safetensors").exists()


def test_what_cannot_be_exported_is_told_before_the_first_step(target: Target, inputs: dict[str, Path],
                                                               tmp_path: Path) -> None:
    wrong = partial(Misled, **make_dflash(anchors=16, layers=1, tap_layers=[1, 2]).keywords)
    run(stage(target, drafter=wrong, steps=1, acceptance=acceptance(5, prompts=1)), inputs, tmp_path / "fine")

    class Unreadable(Misled):
        @classmethod
        def restore(cls, *given: Any) -> Any:
            raise UserError("no such speculator")

    torn = partial(Unreadable, **wrong.keywords)
    with pytest.raises(UserError, match="no such speculator"):
        run(stage(target, drafter=torn, acceptance=acceptance(5)), inputs, tmp_path / "out")
    assert not (tmp_path / "out/measured").exists() and log_of(tmp_path / "out") == []


def test_without_held_out_samples_nothing_is_measured(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    responses = write_responses(tmp_path / "responses", SAMPLES)
    record = run(stage(target, steps=2, acceptance=acceptance(1)), {**inputs, "responses": responses},
                 tmp_path / "out")
    assert "best_step" not in record and record["gates"] == {}
    assert "no held-out sample, or none that leaves room" in capsys.readouterr().out


def test_best_weights_that_were_damaged_are_told(target: Target, inputs: dict[str, Path],
                                                 tmp_path: Path) -> None:
    made = stage(target, acceptance=Told(1.0, 1.1, 1.6, 1.3, 1.2, 1.5))
    run(made, inputs, tmp_path / "out")
    path = tmp_path / "out/checkpoints/step_000006/weights.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=f"{path} .*holds the best weights of the run; remove .*checkpoints"):
        run(made, inputs, tmp_path / "out")
