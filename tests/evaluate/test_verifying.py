"""The kernel that verifies drafts is chosen by `hardware.verify`, and decides no result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tiny import acceptance, engine

from trainer import pipeline
from trainer._paths import find
from trainer.architectures.dflash import DFlash
from trainer.check import check
from trainer.compose import compose_configuration
from trainer.errors import UserError
from trainer.evaluate.decode import Verifying
from trainer.evaluate.stage import Evaluate
from trainer.evaluate.while_training import AcceptanceRuntime
from trainer.records import Sampling
from trainer.target import Target

CHOICES = find()


def test_another_kernel_makes_no_finished_stage_stale() -> None:
    names = ("cpu", "reference", "triton")
    found = [compose_configuration(["recipe=smoke", f"hardware.verify={name}"], CHOICES) for name in names]
    assert [each.settings["evaluate"]["runtime"]["verify"] for each in found] == list(names)
    assert [each.settings["train"]["acceptance"]["runtime"]["verify"] for each in found] == list(names)
    for each in found:
        assert check(each, CHOICES.groups(), pipeline.Stage) == []
        for stage in each.settings["run"]:
            idle = pipeline.build(each.settings[stage]).idle
            assert pipeline.fingerprint(each.settings[stage], 1, {}, {}, idle) == pipeline.fingerprint(
                found[0].settings[stage], 1, {}, {}, idle), stage


@pytest.mark.parametrize("name", ["evaluate", "train"])
def test_a_kernel_that_cannot_be_had_stops_before_anything_is_loaded(tiny_target: Target, name: str) -> None:
    away = engine()
    away.device = "cuda:1"
    away.preflight = lambda: None  # as where it is there
    runtime = {"evaluate": Verifying, "train": partial(AcceptanceRuntime, ["native"])}[name]
    made = acceptance(1) if name == "train" else Evaluate(
        tiny_target, partial(DFlash, seed=0), engine(), None, "float32", Sampling(12, 0.0, 1.0, 0), 6,
        "first", {}, "error", [3], 1, 0, 2, "speculators", None, 0.02, Verifying("cpu"))
    made.preflight()
    for computing, kernel, told in ((engine(), "triton", "cpu; set hardware.verify=cpu"),
                                    (away, "cpu", "cuda:1; set hardware.verify=triton")):
        with pytest.raises(UserError, match=f"hardware.verify={kernel} needs .* computes on {told}"):
            replace(made, engine=computing, runtime=runtime(kernel)).preflight()
