"""The command line as a user meets it: real processes on a toy configuration, each mistake in a line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer._paths import Choices

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


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


TYPOS = {
    "train.lrr=3": "train.lrr (command line): unknown key; nearest: train.lr",
    "train={lrr: 3}": "train.lrr (command line): unknown key; nearest: train.lr",
    "trian.lr=3": "trian.lr (command line): unknown key; nearest: train.lr",
    "lr=3": "lr (command line): unknown key; nearest: train.lr",
    "+train.lrr=3": "train.lrr (command line): unknown key; nearest: train.lr",
    "+trian=3": "trian (command line): unknown key; nearest: train",
    "~train.lr": "train.lr (command line): is missing; toy_stages.Train needs it",
    "train.lr=fast": "train.lr (command line): must be float, but is 'fast' (str)",
    "train.steps=1.5": "train.steps (command line): must be int, but is 1.5 (float)",
    "train.steps=true": "train.steps (command line): must be int, but is true",
    "train.steps=null": "train.steps (command line): must be int, but is null",
    "train.drafter.kernel=plain": "train.drafter.kernel (command line): train.drafter is ${drafter}; "
                                  "set drafter.kernel instead",
    "drafter.kernel=used": "drafter.kernel (command line): must be one of plain, fused, but is 'used' (str)",
    "hardware.devise=x": "hardware.devise (command line): unknown key; nearest: hardware.device",
    "prompts.sampling.temprature=1": "prompts.sampling.temprature (command line): unknown key; nearest: "
                                     "prompts.sampling.temperature",
    "prompts.mixture.code=1": "prompts.mixture.code (command line): unknown key; prompts.mixture takes chat, "
                              "math",
    "run=[trian]": "run (command line): there is no stage 'trian'; nearest: train; stages: prompts, train, "
                   "report",
    "run=train": "run (command line): must be list[str] that is not empty and without repetition, but is "
                 "'train' (str); a list is written run=[train]",
    "seed=x": "seed (command line): must be int of at least 0 and below 9223372036854775808, but is 'x' "
              "(str)",
    "+foo=1": "foo (command line): unknown key; the configuration takes cache_root, command, drafter, "
              "hardware, prompts, recipe_name, report, run, run_root, seed, train",
    "foo=1": "foo (command line): unknown key; the configuration takes drafter, hardware, prompts, recipe, "
             "recipe_name, report, run, run_root, seed, train",
    "drafter.foo=1": "drafter.foo (command line): unknown key; drafter takes block_size, kernel",
    "drafter.target=x": "drafter.target (command line): unknown key; drafter can take it but does not set "
                        "it: write +drafter.target=...",
    "recipe=frist": "recipe (command line): there is no 'frist'; nearest: first; choices: first, second",
    "recipe=": "recipe (command line): there is no ''; choices: first, second",
    "recip=second": "recip (command line): unknown key; nearest: recipe",
    "prompts=none": "prompts (command line): there is no 'none'; choices: few, many",
    "train=null": "train (command line): there is no 'null'; choices: default",
    "train.lr=1,2": "train.lr (command line): one run takes one value; a list is written train.lr=[a,b], and "
                    "several values to compare need one command each",
    "hydra.run.dir=x": "hydra.run.dir (command line): Hydra's own settings have no effect here; leave it out",
    "prompts.source.path=missing": "the folder missing does not exist; set source.path",
}


@pytest.mark.parametrize("argument", TYPOS)
def test_a_mistake_on_the_command_line_is_one_line(toy: Path, capfd: pytest.CaptureFixture,
                                                   argument: str) -> None:
    assert quick(toy, argument) == 2
    told = capfd.readouterr()
    assert only_line(told.err) == f"error: {TYPOS[argument]}"
    assert not told.out
    assert not Path("runs").exists()


def test_a_choice_that_stands_twice_is_refused(toy: Path, capfd: pytest.CaptureFixture) -> None:
    """The last one would win, and who wrote the first believes that it did."""
    assert quick(toy, "recipe=first", "recipe=second") == 2
    assert only_line(capfd.readouterr().err) == ("error: recipe (command line): is chosen twice; give one "
                                                 "choice of it")


RECIPES = {
    "train: {lrr: 3}": "train.lrr (recipes/bad.yaml): unknown key; nearest: train.lr",
    "trian: {lr: 3}": "trian (recipes/bad.yaml): unknown key; nearest: train",
    "train: {lr: fast}": "train.lr (recipes/bad.yaml): must be float, but is 'fast' (str)",
    "defaults: [first]\ntrain: {stesp: 3}": "train.stesp (recipes/bad.yaml): unknown key; nearest: "
                                            "train.steps",
    "train: 5": "train (recipes/bad.yaml): must be a node of keys, but is 5 (int)",
    "drafter: {_partail_: true}": "drafter._partail_ (recipes/bad.yaml): unknown key; nearest: "
                                  "drafter._partial_",
    "hardware: {devise: cpu}": "hardware.devise (recipes/bad.yaml): unknown key; nearest: hardware.device",
    "prompts: {runtime: {thread: 3}}": "prompts.runtime.thread (recipes/bad.yaml): unknown key; nearest: "
                                       "prompts.runtime.threads",
    "defaults: [{override /drafte: small}]": "drafte (recipes/bad.yaml): in defaults: unknown key; nearest: "
                                             "drafter",
    "defaults: [{override /drafter: smal}]": "drafter (recipes/bad.yaml): there is no 'smal'; nearest: "
                                            "small; choices: small",
    "defaults: [{override drafter: small}]": "drafter (recipes/bad.yaml): in defaults: write it as /drafter",
    "defaults: [/recipe/frist]": "recipe (recipes/bad.yaml): there is no 'frist'; nearest: first; choices: "
                                 "bad, first, second",
    "defaults: first": "recipes/bad.yaml must hold 'key: value' lines, and its defaults a list",
    "train: {lr: '${trian.lr}'}": "train.lr (recipes/bad.yaml): ${trian.lr} leads nowhere: unknown key; "
                                  "nearest: train.lr",
    "seed: ${prompts.cuont}": "seed (recipes/bad.yaml): ${prompts.cuont} leads nowhere: unknown key; "
                              "nearest: prompts.count",
    "train: {lr: '${oc.env:TOY_UNSET}'}": "train.lr (recipes/bad.yaml): ${oc.env:TOY_UNSET} leads nowhere: "
                                          "\"Environment variable 'TOY_UNSET' not found\"",
    "train: {lr: '${train.lr}'}": "train.lr (recipes/bad.yaml): ${train.lr} leads nowhere: "
                                  "Recursive interpolation detected",
    "prompts: {sampling: {_target_: toy_stages.Samplin}}": "prompts.sampling._target_ (recipes/bad.yaml): "
                                                           "toy_stages has no 'Samplin'; nearest: Sampling",
    "prompts: {sampling: {_target_: toys.Sampling}}": "prompts.sampling._target_ (recipes/bad.yaml): there "
                                                      "is no module 'toys'; a _target_ is module.Class",
    "a: [1": "recipes/bad.yaml line 1 cannot be read: expected ',' or ']', but got '<stream end>'",
    "seed: 1\nseed: 2": "recipes/bad.yaml line 2 cannot be read: found duplicate key seed",
}


@pytest.mark.parametrize("text", RECIPES)
def test_a_mistake_in_a_recipe_is_one_line_that_names_it(toy: Path, capfd: pytest.CaptureFixture,
                                                         text: str) -> None:
    write(toy / "recipes/bad.yaml", text)
    assert quick(toy, "recipe=bad") == 2
    told = capfd.readouterr()
    assert only_line(told.err) == f"error: {RECIPES[text]}"
    assert not told.out


def test_a_mistake_in_a_group_file_names_that_file(toy: Path, capfd: pytest.CaptureFixture) -> None:
    file = toy / "conf/train/default.yaml"
    file.write_text(file.read_text().replace("steps: 10", "stpes: 10").replace("lr: 1e-3", "lr: ???"))
    assert quick(toy, "recipe=null") == 2 and "choices" in capfd.readouterr().err
    assert quick(toy) == 2
    assert capfd.readouterr().err.splitlines() == [
        "error: train.stpes (conf/train/default.yaml): unknown key; nearest: train.steps",
        "error: train.lr (conf/train/default.yaml): has no value yet and needs one; set it in a recipe or as "
        "train.lr=..."]


FIXED = """
@dataclass(frozen=True)
class Fixed(Stage):
    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    count: int

    def run(self, inputs, out):
        return {}
"""


def test_another_option_does_without_what_a_recipe_sets_for_the_first(toy: Path,
                                                                      capfd: pytest.CaptureFixture) -> None:
    write(toy / "toy_stages.py", STAGES + FIXED)
    write(toy / "conf/prompts/fixed.yaml", "_target_: toy_stages.Fixed\ncount: 5\n")
    write(toy / "recipes/tuned.yaml", "prompts: {count: 7, sampling: {temperature: 0.5}}\n")
    write(toy / "recipes/child.yaml", "defaults: [/recipe/tuned]\nprompts: {runtime: {threads: 4}}\n")
    assert quick(toy, "--cfg", "job", "recipe=child", "prompts=fixed") == 0
    told = capfd.readouterr()
    assert told.err.splitlines() == [
        f"note: recipes/{file}.yaml sets prompts.{key} for prompts=few, which prompts=fixed cannot take and "
        "does without" for file, key in (("tuned", "sampling"), ("child", "runtime"))]
    assert "count: 7" in told.out and "sampling" not in told.out
    assert quick(toy, "--check", "recipe=child", "prompts=many") == 0
    assert not capfd.readouterr().err, "what the new option takes is kept"
    assert quick(toy, "recipe=tuned", "prompts=fixed", "prompts.sampling.seed=1") == 2
    assert capfd.readouterr().err.splitlines()[1:] == [
        "error: prompts.sampling.seed (command line): unknown key; it belongs to prompts=few, and not to "
        "prompts=fixed"]


def test_a_mistake_in_an_option_is_blamed_on_its_file(toy: Path, capfd: pytest.CaptureFixture) -> None:
    write(toy / "conf/train/wrong.yaml", FILES["conf/train/default.yaml"].replace("steps: 10", "stpes: 10"))
    assert quick(toy, "train=wrong", "recipe=second") == 2
    assert "error: train.stpes (conf/train/wrong.yaml): unknown key" in capfd.readouterr().err


def test_all_problems_are_told_at_once(toy: Path, capfd: pytest.CaptureFixture) -> None:
    write(toy / "recipes/bad.yaml", "train: {lrr: 3}\nprompts: {count: many}\n")
    assert quick(toy, "recipe=bad", "drafter.block=2", "seed=x") == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["drafter.block", "seed", "prompts.count", "train.lrr"]


def test_flags_that_do_not_exist(toy: Path, capfd: pytest.CaptureFixture) -> None:
    for arguments, said in ((["-m"], "--multirun is not supported"), (["seed"], "'seed' cannot be read"),
                            (["--cfg", "hydra"], "write --cfg job"),
                            (["--recipe=first"], "no flag --recipe=first")):
        assert quick(toy, *arguments) == 2
        assert said in only_line(capfd.readouterr().err)


def test_a_run_from_any_folder_and_its_reuse(toy: Path) -> None:
    first = call(toy)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[0] == "recipe first"
    report = Path(first.stdout.splitlines()[-1])
    assert report.name == "report.json" and report.exists() and report.parts[:2] == ("runs", "report")
    assert {path.name for path in Path().iterdir()} == {"runs"}, "Hydra left something behind"
    again = call(toy, "train.runtime.interval=5")
    assert again.stdout.count(" reuse ") == 3 and again.stdout.splitlines()[-1] == str(report)
    changed = call(toy, "train.lr=1e-4", "run=[prompts,train]")
    assert " reuse " in changed.stdout.splitlines()[1] and " run " in changed.stdout.splitlines()[2]
    assert changed.stdout.splitlines()[-1].startswith("runs/train/")
    latest = json.loads(Path("runs/latest.json").read_text())
    assert Path(latest["train"]) == Path(changed.stdout.splitlines()[-1]).resolve()
    assert Path(latest["report"]) == report.parent.resolve()


def test_a_recipe_builds_on_another_and_the_command_line_beats_it(toy: Path,
                                                                  capfd: pytest.CaptureFixture) -> None:
    assert quick(toy, "--cfg", "job", "--resolve", "recipe=second", "train.lr=0.5", "hardware=gpu") == 0
    shown = capfd.readouterr().out
    for text in ("count: 30", "steps: 20", "lr: 0.5", "device: cuda", "recipe_name: second"):
        assert text in shown
    assert "${" not in shown


def test_cfg_hides_secrets_and_shows_where_they_come_from(toy: Path) -> None:
    shown = call(toy, "--cfg", "job", "--resolve", TOY_TOKEN="sesame")
    assert shown.returncode == 0 and "token: '***'" in shown.stdout and "sesame" not in shown.stdout
    assert "token: ${oc.env:TOY_TOKEN,none}" in call(toy, "--cfg", "job", TOY_TOKEN="sesame").stdout


def test_check_plans_without_running(toy: Path, capfd: pytest.CaptureFixture) -> None:
    assert quick(toy, "--check") == 0
    assert capfd.readouterr().out.count(" run ") == 3
    assert not Path("runs").exists()


def test_check_names_all_that_is_missing(toy: Path, capfd: pytest.CaptureFixture) -> None:
    for arguments in (["--check"], []):
        assert quick(toy, *arguments, "run=[report]") == 2
        assert only_line(capfd.readouterr().err) == (
            "error: run= leaves out what has no finished folder for these settings in runs: 'prompts' (read "
            "by 'train'), 'train' (read by 'report'); write 'run=[prompts,train,report]'")
    assert not Path("runs").exists()


def test_what_stages_say_of_their_settings_is_told(toy: Path, capfd: pytest.CaptureFixture) -> None:
    judging = """
        def check(self, stages):
            return {"train.steps": f"above {stages['prompts'].count}", "train.drafter.kernel": "is old"}

        def preflight(self):
            raise UserError("no device")
    """
    text = STAGES.replace("    drafter: object\n", "    drafter: object\n" + textwrap.indent(textwrap.dedent(
        judging), "    "))
    write(toy / "toy_stages.py", text)
    for arguments in (["--check"], []):
        assert quick(toy, *arguments, "drafter.kernel=fused") == 2
        told = capfd.readouterr()
        assert told.err.splitlines() == ["error: train.steps (recipes/first.yaml): above 3",
                                         "error: drafter.kernel (command line): is old"] and not told.out
    write(toy / "toy_stages.py", text.replace("return {", "return {} and {"))
    sys.modules.pop("toy_stages")
    assert quick(toy, "--check") == 2
    assert only_line(capfd.readouterr().err) == "error: no device"


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(toy: Path) -> None:
    fault = call(toy, "train.fault=bug")
    assert fault.returncode == 1
    said = "internal error: KeyError: 'no such thing'; set HYDRA_FULL_ERROR=1 for the traceback"
    assert only_line(fault.stderr) == said
    full = call(toy, "train.fault=bug", HYDRA_FULL_ERROR="1")
    assert full.returncode == 1 and "Traceback" in full.stderr and "toy_stages.py" in full.stderr


def test_what_a_stage_tells_the_user_is_one_line(toy: Path, capfd: pytest.CaptureFixture) -> None:
    assert quick(toy, "train.fault=user") == 2
    assert only_line(capfd.readouterr().err) == "error: the server died | last line of its log"


def test_a_full_disk_is_one_sentence_and_loses_nothing(toy: Path, capfd: pytest.CaptureFixture) -> None:
    assert quick(toy, "train.fault=full") == 2
    line = only_line(capfd.readouterr().err)
    assert line.startswith("error: the disk is full: stage 'train'") and "run the same command" in line
    assert len(list(Path("runs/train").glob("*.partial/calls.txt"))) == 1
    assert len(list(Path("runs/prompts").glob("*/stage.json"))) == 1


def heed_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and would hand that down to the process under test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_stopped_while_it_begins_it_says_so_in_a_line(toy: Path) -> None:
    write(toy / "first/hydra/__init__.py", "import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = f"{PROJECT}{os.pathsep}{toy / 'first'}"
    with subprocess.Popen([sys.executable, "-m", "trainer", "--check"], env=environment(toy, PYTHONPATH=path),
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          preexec_fn=heed_interrupts) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert (process.returncode, only_line(told)) == (130, "stopped; the same command goes on from here")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_cleans_up_and_goes_on(toy: Path, number: int, code: int) -> None:
    arguments = [*command(toy), "train.fault=slow"]
    with subprocess.Popen(arguments, env=environment(toy), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, preexec_fn=heed_interrupts) as process:
        while "sleeping" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
    assert process.returncode == code
    assert only_line(told) == "stopped; the same command goes on from here"
    assert len(list(Path("runs/train").glob("*.partial/cleaned.txt"))) == 1
    assert not list(Path("runs").rglob("*.lock"))
    again = call(toy, "train.fault=slow")
    assert again.returncode == 0 and " continue " in again.stdout and "calls 2" in again.stdout


def test_two_runs_of_one_stage_and_a_run_after_kill_9(toy: Path) -> None:
    arguments = [*command(toy), "train.fault=slow"]
    with subprocess.Popen(arguments, env=environment(toy), text=True, stdout=subprocess.PIPE) as process:
        while "sleeping" not in process.stdout.readline():
            assert process.poll() is None
        second = call(toy, "train.fault=slow")
        process.kill()
    assert second.returncode == 2
    assert f"stage 'train' is being written by process {process.pid} " in only_line(second.stderr)
    third = call(toy, "train.fault=slow")
    assert third.returncode == 0 and " continue " in third.stdout


def test_help_is_our_own_and_imports_nothing_heavy(toy: Path) -> None:
    code = ("import sys; from trainer.__main__ import main; code = main(['--help']); "
            "heavy = {'torch', 'transformers', 'rich'} & set(sys.modules); "
            "sys.exit(f'imported {heavy}' if heavy else code)")
    told = subprocess.run([sys.executable, "-c", code], env=environment(toy), text=True, capture_output=True)
    assert (told.returncode, told.stderr) == (0, "")
    for text in ("usage: python -m trainer", "eagle3_smollm2*", "hidden_states", "exit codes", "--cfg job"):
        assert text in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 110
    listed = call(toy, "--help").stdout
    for text in ("few*, many", "The second: more prompts.", "A handful of prompts."):
        assert text in listed


def test_help_stars_what_the_default_recipe_takes(toy: Path) -> None:
    """Not what stands behind it: there the recipe chooses other options."""
    write(toy / "recipes/first.yaml", "defaults: [{override /prompts: many}, {override /hardware: gpu}]\n")
    listed = call(toy, "--help").stdout
    assert "few, many*" in listed and "cpu, gpu*" in listed and "first*" in listed


def test_help_names_stages_that_run_only_where_they_are_asked_for(toy: Path) -> None:
    write(toy / "conf/config.yaml", FILES["conf/config.yaml"].replace("run: [prompts, train, report]",
                                                                      "run: [prompts, train]"))
    write(toy / "conf/report/default.yaml", "# All of it.\n" + FILES["conf/report/default.yaml"])
    lines = [line.split(maxsplit=1) for line in call(toy, "--help").stdout.splitlines()]
    titles = [number for number, line in enumerate(lines) if line[:1] in (["stages,"], ["further"])]
    in_order, further = (lines[title + 1:title + 4] for title in titles)
    assert [line[0] for line in in_order[:2]] == ["prompts", "train"] and in_order[2] == []
    assert further[:2] == [["report", "All of it."], []], "a drafter is no stage"
    told = subprocess.run([sys.executable, "-m", "trainer", "--help"], env=environment(toy), text=True,
                          capture_output=True).stdout.partition("\nfurther stages")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in told.splitlines()[1:] if line[2] != " "] == [
        "plan", "serve_command", "upload", "sweep", "tune"]


GONE = "note: the output cannot be written any more ({}); the run goes on without it"
FULL = "No space left on device"


@pytest.mark.parametrize(("arguments", "where", "code", "said"), [
    ("--help", "| true", 0, ""), ("--cfg job", "2>&1 | true", 0, ""),
    ("--help", "> /dev/full", 2, f"error: the output cannot be written ({FULL}); give it another place"),
    ("", "| true", 0, GONE.format("Broken pipe")), ("", "2>&1 | true", 0, ""), ("", ">&- 2>&-", 0, ""),
    ("", "> /dev/full", 0, GONE.format(FULL)), ("train.fault=user", "> /dev/full 2>&1", 2, "")])
def test_nobody_reads_or_can_take_the_output(toy: Path, arguments: str, where: str, code: int,
                                             said: str) -> None:
    """A run goes on: its result lies in files. For what is asked for its output, a full disk is an error."""
    line = f"{shlex.join(command(toy))} {arguments} {where}; exit ${{PIPESTATUS[0]}}"
    told = subprocess.run(["bash", "-c", line], env=environment(toy), text=True, capture_output=True)
    assert (told.returncode, told.stderr.strip()) == (code, said)
    assert bool(list(Path().glob("runs/report/*/report.json"))) == (arguments == "")


def test_ctrl_c_while_the_imports_go_on_is_told_in_a_line(toy: Path) -> None:
    (toy / "hydra").mkdir()
    (toy / "hydra/__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    told = subprocess.run([sys.executable, "-m", "trainer"], text=True, capture_output=True,
                          env=environment(toy) | {"PYTHONPATH": f"{toy}{os.pathsep}{PROJECT}"},
                          preexec_fn=heed_interrupts)
    assert (told.returncode, told.stdout) == (130, "") and told.stderr.startswith("stopped; ")


def test_paths_that_cannot_be(toy: Path, capfd: pytest.CaptureFixture) -> None:
    for root, said in (("", "run_root (command line): must be str that is not empty"),
                       ("x" * 300, "File name too long")):
        assert quick(toy, f"run_root={root}") == 2
        assert said in only_line(capfd.readouterr().err)


def test_the_layout_of_the_wheel(toy: Path) -> None:
    """The package alone, with conf/ and recipes/ inside it, composes the real recipes from any folder."""
    site = toy / "site"
    shutil.copytree(PROJECT / "trainer", site / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT / "conf", site / "trainer/conf")
    shutil.copytree(PROJECT / "recipes", site / "trainer/conf/recipe")
    for arguments in (["--help"], ["--cfg", "job"], ["--cfg", "job", "recipe=smoke"], ["recipe=none"]):
        told = subprocess.run([sys.executable, "-m", "trainer", *arguments], text=True, capture_output=True,
                              env=environment(toy) | {"PYTHONPATH": str(site)})
        assert told.returncode == (2 if arguments == ["recipe=none"] else 0), told.stderr
        assert "smoke" in told.stdout + told.stderr or arguments == ["--cfg", "job"]
