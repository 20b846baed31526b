"""Parity gates: a number that must hold before the run may go on.

A gate that fails stops the run with one message that names the likely cause; nothing is retried or softened.
A value that is not a number never passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.errors import GateFailed


@dataclass(frozen=True)
class Gate:
    """`value` must be `comparison` `bound`; `cause` is what to look at first when it is not."""

    name: str
    value: float
    bound: float
    comparison: Literal[">=", "<="]
    cause: str

    def __post_init__(self) -> None:
        assert self.comparison in (">=", "<="), self.comparison

    @property
    def passed(self) -> bool:
        return bool(self.value >= self.bound if self.comparison == ">=" else self.value <= self.bound)

    def to_json(self) -> dict[str, Any]:
        return {"value": float(self.value), "bound": float(self.bound), "comparison": self.comparison,
                "passed": self.passed, "cause": self.cause}


def require(gates: list[Gate]) -> dict[str, dict[str, Any]]:
    """The gates as JSON by name; raises `GateFailed` with one message when any of them does not hold."""
    names = [gate.name for gate in gates]
    assert len(set(names)) == len(names), f"two gates of one name in {names}"
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise GateFailed("; ".join(f"gate {gate.name} failed: {gate.value:.6g}, must be {gate.comparison} "
                                   f"{gate.bound:.6g}; likely cause: {gate.cause}" for gate in failed))
    return {gate.name: gate.to_json() for gate in gates}
