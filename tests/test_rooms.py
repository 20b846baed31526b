"""The import law: which room may import which, read from the source with ast, at any depth of the code.

A room is a module or a package directly below `trainer/`. `engines.base` allows that module alone, `data` the
whole room. Concrete drafters, engines and sources are named by the YAML: other rooms import their `base`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "trainer"
EVERYWHERE = {"errors", "gates", "progress", "ranges"}
LAW: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"__init__", "_secrets", "pipeline", "check", "compose", "_paths", "strategies.launch",
                 "strategies.world"},
    "_paths": set(),
    "_folders": set(),
    "_secrets": set(),
    "_fits": {"_paths"},
    "_weight_files": {"_folders"},
    "check": {"_paths", "_fits"},
    "compose": {"_paths", "_secrets", "check"},
    "_stage_record": {"__init__", "_folders"},
    "_latest": {"_folders"},
    "_stages": {"_stage_record"},
    "_together": {"_folders", "strategies.launch", "strategies.meeting", "strategies.world"},
    "pipeline": {"__init__", "_folders", "_secrets", "_stage_record", "_stages", "_latest", "_together",
                 "check", "strategies.world"},
    "errors": set(),
    "gates": set(),
    "progress": set(),
    "ranges": set(),
    "records": set(),
    "page": set(),
    "cpu_build": set(),
    "kernels": set(),
    "vllm_plugin": {"kernels"},
    "target_fit": {"_fits", "_weight_files"},
    "target": {"records", "target_fit", "_weight_files"},
    "target_made": {"target", "_folders"},
    "target_head": {"records", "target", "target_fit", "_weight_files"},
    "architectures": {"records", "kernels", "target_head"},
    "strategies": {"records", "architectures.base"},
    "engines": {"records", "target", "target_fit", "_weight_files", "cpu_build", "strategies.world"},
    "data": {"records", "pipeline", "target", "engines.base", "page"},
    "hidden_states": {"records", "pipeline", "target", "target_fit", "target_head", "data", "engines.base"},
    "training": {"records", "pipeline", "target", "target_head", "data", "hidden_states.base",
                 "hidden_states.prefetch", "architectures.base", "strategies.base", "strategies.process",
                 "strategies.world", "_folders", "_weight_files"},
    "export": {"records", "pipeline", "target", "target_head", "data", "hidden_states.base",
               "architectures.base", "architectures.geometry", "architectures.layers",
               "architectures.mtp_layouts", "architectures.mtp_module", "architectures.tensors",
               "training.build", "_fits", "_folders", "_stage_record", "_weight_files", "cpu_build"},
    "evaluate": {"records", "pipeline", "target", "target_head", "data", "engines.base", "architectures.base",
                 "export.formats", "export.calibration", "export.tuned", "training.build",
                 "training.measuring", "kernels.select", "kernels.verification", "page"},
}
# Packages from outside that only some files may import; a name of a room stands for the whole room.
ONLY_IN = {
    "hydra": {"compose", "pipeline"},
    "omegaconf": {"__main__", "compose", "pipeline"},
    "vllm": {"hidden_states.vllm_connector", "vllm_plugin"},
    "triton": {"kernels"},
}
# Rooms and files that may import nothing from outside but this.
NOTHING_BUT = {
    "records": {"torch"},
    "kernels": {"torch", "numpy", "triton", "vllm"},
    "vllm_plugin": {"torch", "numpy", "vllm"},
    "hidden_states.vllm_connector": {"torch", "safetensors", "vllm"},
    "check": set(),
    "_fits": set(),
    "_paths": set(),
    "_folders": {"xxhash"},
    "_weight_files": set(),
    "_secrets": set(),
    "errors": set(),
    "gates": set(),
    "progress": {"rich"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path, package: Path = PACKAGE) -> str:
    """`engines.base` for engines/base.py, `engines` for engines/__init__.py, `__init__` for the package's."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def modules() -> set[str]:
    return {name_of(file) for file in FILES} | {name_of(file).split(".")[0] for file in FILES}


def imports(source: str, name: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """Everything imported, absolute; `from trainer.engines import base` imports `trainer.engines.base`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                here = ["trainer", *name.split(".")][: None if is_package else -1]
                start = ".".join([*here[:len(here) - node.level + 1], *([start] if start else [])])
            for alias in node.names:
                inner = f"{start}.{alias.name}"
                yield inner if inner in {f"trainer.{each}" for each in known} else start


def breaches(source: str, name: str, is_package: bool = False, known: set[str] | None = None) -> list[str]:
    """What a file imports against the law."""
    room, found = name.split(".")[0], []
    for imported in imports(source, name, is_package, modules() if known is None else known):
        top = imported.split(".")[0]
        if top == "trainer":
            inner = imported.removeprefix("trainer").removeprefix(".") or "__init__"
            allowed = (EVERYWHERE | LAW[room] | {room}) if name not in NOTHING_BUT or name == room else set()
            fine = any(inner == each or inner.startswith(f"{each}.") for each in allowed)
        else:
            inner = top
            fine = top in sys.stdlib_module_names or all(
                top in NOTHING_BUT[part] for part in {room, name} & NOTHING_BUT.keys())
            fine = fine and (top not in ONLY_IN or bool({room, name} & ONLY_IN[top]))
        if not fine:
            found.append(inner)
    return found


def test_every_room_has_a_law() -> None:
    rooms = {name_of(file).split(".")[0] for file in FILES}
    assert len(FILES) > 10
    assert rooms <= LAW.keys(), f"a new room needs its line in LAW: {sorted(rooms - LAW.keys())}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_import_law(file: Path) -> None:
    found = breaches(file.read_text(encoding="utf-8"), name_of(file), file.name == "__init__.py")
    assert not found, f"{file.relative_to(PACKAGE.parent)} may not import {found}"


KNOWN = {"engines", "engines.base", "engines.vllm_server", "architectures", "architectures.dflash",
         "architectures.base", "data", "data.chat", "errors", "pipeline", "hidden_states",
         "hidden_states.vllm_connector", "records"}


@pytest.mark.parametrize(("source", "name", "found"), [
    ("from trainer.engines.base import TargetEngine", "data.responses", []),
    ("from trainer.engines import base", "data.responses", []),
    ("from trainer.engines import vllm_server", "data.responses", ["engines.vllm_server"]),
    ("import trainer.engines.vllm_server", "evaluate.serving", ["engines.vllm_server"]),
    ("from trainer.engines import TargetEngine", "data.responses", ["engines"]),
    ("from ..engines.vllm_server import VllmServer", "data.responses", ["engines.vllm_server"]),
    ("from . import chat", "data.responses", []),
    ("from .chat import render", "data.responses", []),
    ("def late():\n    from trainer.training.loop import train", "data.responses", ["training.loop"]),
    ("from trainer.architectures.dflash import DFlash", "architectures.dspark", []),
    ("from trainer.architectures.dflash import DFlash", "training.stage", ["architectures.dflash"]),
    ("from trainer.errors import UserError\nfrom trainer.gates import Gate", "kernels.losses", []),
    ("from trainer.pipeline import Stage", "engines.base", ["pipeline"]),
    ("from trainer.check import check", "data.prompts", ["check"]),
    ("from trainer import __version__", "pipeline", []),
    ("from trainer import __version__", "data.prompts", ["__init__"]),
    ("import hydra", "pipeline", []),
    ("from hydra.utils import instantiate", "training.stage", ["hydra"]),
    ("from omegaconf import OmegaConf", "check", ["omegaconf"]),
    ("import vllm", "engines.vllm_server", ["vllm"]),
    ("import vllm, torch, safetensors", "hidden_states.vllm_connector", []),
    ("from trainer.records import Sample", "hidden_states.vllm_connector", ["records"]),
    ("import numpy", "hidden_states.vllm_connector", ["numpy"]),
    ("import triton", "kernels.losses", []),
    ("import triton", "architectures.layers", ["triton"]),
    ("import transformers", "kernels.losses", ["transformers"]),
    ("import transformers", "target_head", []),
    ("import torch\nfrom pathlib import Path", "records", []),
    ("import numpy", "records", ["numpy"]),
])
def test_the_law_catches_breaches_and_nothing_else(source: str, name: str, found: list[str]) -> None:
    assert breaches(source, name, known=KNOWN) == found


def test_a_package_imports_relative_to_itself() -> None:
    assert breaches("from .base import TargetEngine", "engines", is_package=True, known=KNOWN) == []
    source = "from .vllm_server import X\nfrom ..pipeline import Stage"
    assert breaches(source, "engines", is_package=True, known=KNOWN) == ["pipeline"]


@pytest.mark.parametrize("name", [path.stem for path in (PACKAGE.parent / "conf/drafter").glob("*.yaml")])
def test_the_readme_s_table_and_the_help_name_every_drafter(name: str) -> None:
    from trainer._paths import description, find

    text = (PACKAGE.parent / "README.md").read_text(encoding="utf-8").partition("\n## Drafters\n")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert any(row.startswith(f"| `{name}` |") for row in rows), \
        f"conf/drafter/{name}.yaml has no row in README.md's table of Drafters"
    said = description(PACKAGE.parent / f"conf/drafter/{name}.yaml")
    assert said, f"conf/drafter/{name}.yaml does not begin with a comment, which --help shows"
    shown = " ".join(find().listing([], {"drafter": "dflash"}).partition("\ndrafters ")[2].split())
    assert f" {said}" in shown and f" {name}" in shown
