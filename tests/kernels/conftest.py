"""The implementations of verification: whatever a test says of `verify`, it says of each."""

from __future__ import annotations

import pytest
from steps import Implementation, Verify

from trainer.kernels.select import verify as chosen

IMPLEMENTATIONS = {
    "reference": Implementation(chosen("reference"), 0.01),
    "cpu": Implementation(chosen("cpu"), 1),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "reference"])
def twin(request: pytest.FixtureRequest) -> Verify:
    """One that has to say what the reference says."""
    return IMPLEMENTATIONS[request.param].verify


@pytest.fixture
def verify(implementation: Implementation) -> Verify:
    return implementation.verify
