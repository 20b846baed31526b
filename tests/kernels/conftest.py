"""The implementations of verification: whatever a test says of `verify`, it says of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreted import INTERPRETER
from steps import Implementation, Verify

from trainer.kernels.select import verify as chosen

IMPLEMENTATIONS = {
    "reference": Implementation(chosen("reference"), 0.01),
    "cpu": Implementation(chosen("cpu"), 1),
    "triton": Implementation(INTERPRETER.verify, 0.01, steps=2),
}


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    yield
    INTERPRETER.close()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == "triton" else name
                        for name in IMPLEMENTATIONS])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """For many draws, which Triton's interpreter is too slow for in a normal run."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "reference"])
def twin(request: pytest.FixtureRequest) -> Implementation:
    """One that has to say what the reference says."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=IMPLEMENTATIONS)
def verify(request: pytest.FixtureRequest) -> Verify:
    return IMPLEMENTATIONS[request.param].verify
