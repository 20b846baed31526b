"""Every layout has the gradients of one process, leaves what one process leaves, and goes on from what any
other one left."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import finished_inputs
from together import Job, alone, several_strategies, together
from torch import Tensor
from trainings import SAMPLES, check_equal, log_of

from trainer.records import Sample
from trainer.target import Target

DRAFTERS = ("dflash", "eagle3")
# the moment of this optimizer after the first step is the gradient
KEEPING = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "clip": 1e9, "steps": 1}
LEARNING = {"precision": "bfloat16", "steps": 7}
WHOLE = {"steps": 5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(target: Target, inputs: dict[str, Path], place: Path) -> Path:
    """What one process leaves: by drafter the gradient of four rows, and a whole run; and one that is
    measured, in bfloat16."""
    folder = place / "one"
    folder.mkdir()
    for drafter in DRAFTERS:
        alone(target, inputs, Job(folder / f"gradient-{drafter}", {**KEEPING, "accumulate": 4}, drafter))
        alone(target, inputs, Job(folder / f"whole-{drafter}", WHOLE, drafter))
    alone(target, inputs, Job(folder / "learning", LEARNING, measured=5))
    return folder


@pytest.fixture(scope="module", params=several_strategies())
def two(request: pytest.FixtureRequest, target: Target, inputs: dict[str, Path], place: Path,
        one: Path) -> Path:
    """The same of two processes, and runs that go on where one of the same layout stood, or one process."""
    folder = place / request.param
    folder.mkdir()
    jobs = [Job(folder / "learning", LEARNING, measured=5)]
    for drafter in DRAFTERS:
        whole = folder / f"whole-{drafter}"
        jobs += [Job(folder / f"gradient-{drafter}", {**KEEPING, "accumulate": 4}, drafter),
                 Job(whole, WHOLE, drafter),
                 Job(folder / f"again-{drafter}", WHOLE, drafter, begins=whole),
                 Job(folder / f"other-{drafter}", WHOLE, drafter, begins=one / f"whole-{drafter}")]
    together(2, request.param, target, inputs, *jobs)
    return folder


def gradient(folder: Path) -> Tensor:
    """Of the first step, all parameters in a row."""
    found = load_file(folder / "checkpoints/step_000001/optimizer.safetensors")
    assert found and all(name.endswith(".momentum_buffer") for name in found)
    order = sorted(found, key=lambda name: int(name.split(".")[0]))
    return torch.cat([found[name].flatten() for name in order])


def check_gradients(first: Path, second: Path) -> None:
    expected, found = gradient(first), gradient(second)
    assert expected.shape == found.shape and float(expected.norm()) > 1e-3
    assert float((expected - found).norm()) < 1e-6 * float(expected.norm())
    lines = [log_of(folder)[-1] for folder in (first, second)]
    assert lines[1] == pytest.approx(lines[0], rel=1e-6) and lines[0]["grad_norm"] > 0


def check_close(first: Path, second: Path, tolerance: float) -> None:
    """The same rates and rows at the same steps; figures and weights but for what rounding makes of them."""
    lines, others = log_of(first), log_of(second)
    for name in ("step", "lr", "tokens"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in others]
    for name in ("loss", "heldout_loss", "grad_norm"):
        assert [line.get(name, 0.0) for line in others] == pytest.approx(
            [line.get(name, 0.0) for line in lines], rel=tolerance)
    weights, found = (load_file(folder / "weights.safetensors") for folder in (first, second))
    assert weights.keys() == found.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == torch.float32
        assert float((tensor - found[name]).norm()) < tolerance * float(tensor.norm()), name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_processes_have_the_gradient_of_one(one: Path, two: Path, drafter: str) -> None:
    check_gradients(one / f"gradient-{drafter}", two / f"gradient-{drafter}")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_run_of_two_processes_learns_what_one_does(one: Path, two: Path, drafter: str) -> None:
    check_close(one / f"whole-{drafter}", two / f"whole-{drafter}", 1e-4)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_on_the_same_layout_it_goes_on_to_the_same_bits(two: Path, drafter: str) -> None:
    assert (two / f"again-{drafter}/checkpoints/step_000003").is_dir(), "it began there"
    check_equal(two / f"whole-{drafter}", two / f"again-{drafter}")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_processes_go_on_where_one_stood(one: Path, two: Path, drafter: str) -> None:
    check_close(one / f"whole-{drafter}", two / f"other-{drafter}", 1e-4)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_process_goes_on_where_two_stood(target: Target, inputs: dict[str, Path], tmp_path: Path,
                                             two: Path, drafter: str) -> None:
    whole = two / f"whole-{drafter}"
    alone(target, inputs, Job(tmp_path / "out", WHOLE, drafter, begins=whole))
    check_close(whole, tmp_path / "out", 1e-4)


def test_acceptance_is_measured_and_the_masters_are_float32(one: Path, two: Path) -> None:
    """In bfloat16 the layouts differ by its rounding."""
    lines, others = log_of(one / "learning"), log_of(two / "learning")
    assert [line["step"] for line in others] == [line["step"] for line in lines] == [0, 2, 4, 5, 6, 7]
    assert [line["step"] for line in others if "measured" in line] == [0, 5, 7]
    for name in ("loss", "heldout_loss"):
        assert others[-1][name] == pytest.approx(lines[-1][name], rel=0.02)
    weights = load_file(two / "learning/weights.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())


def test_a_process_without_supervision_takes_part(target: Target, tmp_path: Path) -> None:
    """Rows of one sample each, one for each process; in one of them no two supervised tokens stand side by
    side, so that there is nothing to draft."""
    mask = tuple(index in (10, 12, 14) for index in range(len(SAMPLES[2].tokens)))
    samples = [SAMPLES[0], Sample(SAMPLES[2].id, SAMPLES[2].tokens, mask)]
    inputs = finished_inputs(target, tmp_path / "inputs", samples, heldout=0)
    path = inputs["responses"] / "responses.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "mask": sample.loss_mask}) + "\n"
                            for row, sample in zip(rows, samples, strict=True)))
    settings = {**KEEPING, "tokens": 60, "accumulate": 2}
    alone(target, inputs, Job(tmp_path / "one", settings))
    together(2, "ddp", target, inputs, Job(tmp_path / "two", settings))
    check_gradients(tmp_path / "one", tmp_path / "two")
    assert log_of(tmp_path / "two")[-1]["tokens"] == len(SAMPLES[0].tokens) + len(SAMPLES[2].tokens)
