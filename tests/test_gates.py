"""Gates: what passes, and the one message when it does not."""

from __future__ import annotations

import json

import pytest

from trainer.errors import GateFailed, UserError
from trainer.gates import Gate, require

TOP1 = Gate("head_top1", 0.995, 0.99, ">=", "the final norm is applied twice")


def test_gates_that_hold_become_json() -> None:
    held = require([TOP1, Gate("difference", 1e-5, 1e-4, "<=", "layer order")])
    assert json.loads(json.dumps(held)) == {
        "head_top1": {"value": 0.995, "bound": 0.99, "comparison": ">=", "passed": True,
                      "cause": "the final norm is applied twice"},
        "difference": {"value": 1e-5, "bound": 1e-4, "comparison": "<=", "passed": True,
                       "cause": "layer order"}}


@pytest.mark.parametrize(("value", "comparison", "passed"), [
    (0.99, ">=", True), (0.98999, ">=", False), (1.0, ">=", True),
    (0.99, "<=", True), (0.99001, "<=", False), (0.0, "<=", True),
    (float("nan"), ">=", False), (float("nan"), "<=", False),
    (float("inf"), "<=", False), (float("-inf"), ">=", False)])
def test_the_bound_passes_and_what_is_no_number_never_does(value: float, comparison: str,
                                                           passed: bool) -> None:
    assert Gate("g", value, 0.99, comparison, "cause").passed is passed


def test_all_failures_are_one_message_with_value_bound_and_cause() -> None:
    with pytest.raises(GateFailed) as failure:
        require([TOP1, Gate("agreement", 0.5, 0.9, ">=", "taps are shifted by one layer"),
                 Gate("zero_rows", 3, 0, "<=", "the writer stopped early")])
    assert str(failure.value) == (
        "gate agreement failed: 0.5, must be >= 0.9; likely cause: taps are shifted by one layer; "
        "gate zero_rows failed: 3, must be <= 0; likely cause: the writer stopped early")
    assert isinstance(failure.value, UserError)


def test_two_gates_of_one_name_are_our_fault() -> None:
    with pytest.raises(AssertionError, match="head_top1"):
        require([TOP1, TOP1])
    with pytest.raises(AssertionError):
        Gate("g", 1, 1, "==", "cause")
