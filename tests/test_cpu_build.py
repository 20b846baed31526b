"""What vLLM's build for CPUs is told: the same words in the lines that are printed, in README, and by a
server that is started here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainer import cpu_build
from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.cpu_build import CpuServer
from trainer.engines.vllm_installation import Installation
from trainer.export.serve_line import serve_line
from trainer.pipeline import build


def test_a_server_that_is_started_and_a_printed_line_are_told_the_same() -> None:
    started = Installation("python", "0.32.0+cpu", Path("/environment"), True).environment("0", 3)
    printed = CpuServer("float32", 512, 3).variables
    assert printed and printed.items() <= started.items()
    assert not printed.items() & Installation("python", "0.32.0", Path("/environment"), True).environment(
        "0", 3).items(), "a build for GPUs is told nothing of it"


def test_the_line_of_the_readme_is_that_of_the_settings(project: Path) -> None:
    settings = compose_configuration([], find()).settings["export"]["cpu_server"]
    given: CpuServer = build({**settings, "program": f"{cpu_build.ENVIRONMENT}/bin/vllm"})
    place = "runs/export/<fingerprint>/speculators"
    expected = serve_line("PLACE", None, given.flags, given.variables, given.program).replace("PLACE", place)
    text = re.sub(r" \\\n +", " ", (project / "README.md").read_text())
    assert f"\n{expected}\n" in text


def test_the_environment_of_set_up_is_beside_the_project_or_here(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(cpu_build, "__file__", str(project / "trainer/cpu_build.py"))
    monkeypatch.chdir(here)
    assert cpu_build.own_environment() is None
    for folder in (here, project):
        python = folder / cpu_build.ENVIRONMENT / "bin/python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert cpu_build.own_environment() == folder / cpu_build.ENVIRONMENT


def test_a_program_in_a_folder_with_a_space_stays_one_word() -> None:
    line = serve_line("m", None, {}, {}, "/a b/bin/vllm")
    assert shlex.split(line) == ["/a b/bin/vllm", "serve", "m"]
