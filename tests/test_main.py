"""The command line as a user meets it: real processes on a toy configuration, and every mistake in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer._paths import Choices, find

PROJECT = Path(__file__).resolve().parents[1]
STAGES = '''
import os, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from trainer.errors import UserError
from trainer.pipeline import Stage


@dataclass(frozen=True)
class Sampling:
    temperature: float
    seed: int


@dataclass(frozen=True)
class Drafter:
    target: str
    block_size: int
    kernel: Literal["plain", "fused"]


class Needs:
    def __init__(self, path: str) -> None:
        if path == "missing":
            raise UserError(f"the folder {path} does not exist; set source.path")


@dataclass(frozen=True)
class Prompts(Stage):
    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    count: int
    sampling: Sampling
    mixture: dict
    source: Needs
    device: str
    runtime: dict

    def run(self, inputs, out):
        (out / "prompts.txt").write_text("x" * self.count)
        return {"prompts": self.count}


@dataclass(frozen=True)
class Train(Stage):
    after: ClassVar[tuple[str, ...]] = ("prompts",)
    version: ClassVar[int] = 1
    lr: float
    steps: int
    drafter: object
    fault: Literal["none", "bug", "full", "slow", "user"]
    runtime: dict

    def run(self, inputs, out):
        assert (inputs["prompts"] / "prompts.txt").exists()
        calls = out / "calls.txt"
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        if self.fault == "bug":
            raise KeyError("no such thing")
        if self.fault == "user":
            raise UserError("the server died\\n  last line of its log")
        if self.fault == "full":
            with open("/dev/full", "w") as file:
                file.write("x")
        if self.fault == "slow" and len(calls.read_text()) == 1:
            try:
                print("sleeping", flush=True)
                time.sleep(60)
            finally:
                (out / "cleaned.txt").write_text("yes")
        return {"calls": len(calls.read_text())}


@dataclass(frozen=True)
class Report(Stage):
    after: ClassVar[tuple[str, ...]] = ("train",)
    version: ClassVar[int] = 1
    recipe: str

    def run(self, inputs, out):
        (out / "report.json").write_text("{}")
        return {}
'''
FILES = {
    "conf/config.yaml": """\
        defaults: [{prompts: few}, {drafter: small}, {train: default}, {report: default}, {hardware: cpu},
                   _self_, {recipe: first}]
        run_root: runs
        seed: 0
        run: [prompts, train, report]
        recipe_name: null
        """,
    "conf/prompts/few.yaml": """\
        # A handful of prompts.
        _target_: toy_stages.Prompts
        count: 3
        sampling: {_target_: toy_stages.Sampling, temperature: 0.0, seed: "${seed}"}
        mixture: {chat: 0.5, math: 0.5}
        source: {_target_: toy_stages.Needs, path: there}
        device: ${hardware.device}
        runtime: {threads: 2, token: "${oc.env:TOY_TOKEN,none}"}
        """,
    "conf/prompts/many.yaml": "defaults: [few, _self_]\ncount: 30\n",
    "conf/drafter/small.yaml": """\
        # Two layers.
        _target_: toy_stages.Drafter
        _partial_: true
        block_size: 4
        kernel: plain
        """,
    "conf/train/default.yaml": """\
        # Plain training.
        _target_: toy_stages.Train
        lr: 1e-3
        steps: 10
        drafter: ${drafter}
        fault: none
        runtime: {interval: 1}
        """,
    "conf/report/default.yaml": "_target_: toy_stages.Report\nrecipe: ${recipe_name}\n",
    "conf/hardware/cpu.yaml": "device: cpu\nthreads: 2\n",
    "conf/hardware/gpu.yaml": "device: cuda\nthreads: 2\n",
    "recipes/first.yaml": "# The first recipe.\ntrain: {steps: 20}\n",
    "recipes/second.yaml": """\
        # The second: more prompts.
        defaults: [/recipe/first, {override /prompts: many}]
        train: {lr: 2e-3}
        """,
}


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with toy stages; the process stands in a folder of its own beside it."""
    for name, text in FILES.items():
        write(tmp_path / name, text)
    write(tmp_path / "toy_stages.py", STAGES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("toy_stages", None)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def command(toy: Path) -> list[str]:
    return [sys.executable, "-c", "import sys; from pathlib import Path; from trainer.__main__ import main; "
            "from trainer._paths import Choices; here = Path(sys.argv[1]); "
            "sys.exit(main(sys.argv[2:], Choices(here / 'conf', here / 'recipes')))", str(toy)]


def environment(toy: Path, **extra: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return plain | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{toy}"} | extra


def call(toy: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command(toy), *arguments], env=environment(toy, **extra), text=True,
                          capture_output=True, timeout=60)


def quick(toy: Path, *arguments: str) -> int:
    """The same inside this process, for the many mistakes."""
    return main(list(arguments), Choices(toy / "conf", toy / "recipes"))
