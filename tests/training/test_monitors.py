"""What does not move, and what is next to all of the loss, is told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import OFFLINE, make_dflash
from trainings import Stopped, log_of, run, stage

from trainer.architectures import losses
from trainer.architectures.dflash import DFlash
from trainer.errors import UserError
from trainer.target import Target
from trainer.training.monitors import UNMOVED_AFTER, Monitors


class Frozen(DFlash):
    """Has a tensor that nothing reads."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.idle = torch.nn.Parameter(torch.ones(3))


def frozen(**settings: Any) -> Any:
    made = make_dflash(anchors=16, layers=1, **settings)
    return type(made)(Frozen, **made.keywords)


def test_a_tensor_without_a_gradient_is_named_also_by_a_run_that_went_on(
        target: Target, inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"drafter": frozen(), "steps": 56, "heldout_every": 1000, "accumulate": 1}
    Stopped.left = 100
    with pytest.raises(KeyboardInterrupt):
        run(stage(target, source=Stopped, **long), inputs, tmp_path)
    record = run(stage(target, **long), inputs, tmp_path)
    said = capsys.readouterr().out
    assert "going on after step" in said
    assert "train: 1 trained tensors have not moved by step 50: idle; no gradient reaches them" in said
    lines = log_of(tmp_path)
    assert [line["step"] for line in lines if "unmoved" in line] == [50, 56]
    assert record["unmoved"] == lines[-1]["unmoved"] == ["idle"]


def test_a_tensor_that_moves_late_is_no_matter_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    watched, sums = Monitors(model), {"loss": (1.0, 1.0)}
    model.weight.data += 1
    assert watched.watch(UNMOVED_AFTER - 1, False, sums, []) == {}
    early = watched.watch(UNMOVED_AFTER + 3, False, sums, [{"step": UNMOVED_AFTER - 1}])
    assert early == {"unmoved": ["bias"]} and "bias" in capsys.readouterr().out
    with pytest.raises(UserError, match="no trained tensor has moved by step 9, .* raise optimizer.lr"):
        Monitors(model).watch(9, True, sums, [])
    model.bias.data += 1
    assert watched.watch(UNMOVED_AFTER + 9, True, sums, [{"step": UNMOVED_AFTER + 3} | early]) == {}


@pytest.mark.parametrize(("weight", "terms"), [(100.0, ["ce"]), (1.0, [])])
def test_a_term_that_is_next_to_all_of_the_loss_is_told_once(
        target: Target, inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        weight: float, terms: list[str]) -> None:
    both = losses.Objective([losses.CrossEntropy(weight=weight), losses.ForwardKL()], losses.Exponential(7.0))
    made = stage(target, drafter=make_dflash(anchors=16, layers=1, objective=both), source=OFFLINE)
    record = run(made, inputs, tmp_path)
    lines = log_of(tmp_path)
    assert all(line["share/ce"] + line["share/kl"] == pytest.approx(1, abs=1e-4) for line in lines)
    assert [each["term"] for each in record["dominating"]] == terms
    assert capsys.readouterr().out.count("the loss term ce is 100%") == len(terms)
    assert [line["step"] for line in lines if "dominating" in line] == [2] * len(terms)
    assert record["unmoved"] == [] and not any("unmoved" in line for line in lines)


def test_a_single_term_is_not_worth_a_word(target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    record = run(stage(target, steps=2), inputs, tmp_path)
    assert record["dominating"] == [] and not any(name.startswith("share/") for name in record["final"])
