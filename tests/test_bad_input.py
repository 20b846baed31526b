"""What a user can get wrong, through the command line: each is one line with a remedy, and nothing done is
lost."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import ALONE, COMMITS, SMOKE, Home, check_went_on, quick, told
from vllm_support import vllm_python

from trainer.target import Target


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path: Path, cache: Path) -> Home:
    return Home(tmp_path / "home", cache)


PROMPTS = {
    "empty": ("", "prompts.jsonl holds no prompt"),
    "blank lines": ("\n\n", "prompts.jsonl holds no prompt"),
    "malformed": ('{"turns": ["hello"]}\n{"turns": ["hello"\n', "prompts.jsonl, line 2: not valid JSON"),
    "no turns": ('{"text": "hello"}\n', 'prompts.jsonl, line 1: expected an object with "turns"'),
    "too long": (json.dumps({"turns": ["word " * 300]}) + '\n{"turns": ["hi"]}\n', "prompt row-1 has 15"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompts(home: Home, capfd: pytest.CaptureFixture[str], case: str) -> None:
    text, expected = PROMPTS[case]
    path = home.folder / "prompts.jsonl"
    path.write_text(text)
    result = quick(home, capfd, *ALONE, "prompts=jsonl", f"prompts.source.path={path}", "prompts.heldout=0",
                   "run=[prompts,responses]")
    assert expected in told(*result)
    assert not list(home.root.glob("responses/*/responses.jsonl"))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_a_failing_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('users must not speak first') }}")


def with_a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


TARGETS = {without_tokenizer: "has no tokenizer", without_a_shard: "lacks 1 of the 2 shards",
           with_a_failing_template: "users must not speak first", with_a_broken_template: "chat template of"}


@pytest.mark.parametrize("spoil", TARGETS)
def test_bad_targets(home: Home, tiny_target: Target, capfd: pytest.CaptureFixture[str],
                     spoil: Callable[[Path], None]) -> None:
    folder = home.folder / "target"
    shutil.copytree(tiny_target.folder, folder)
    spoil(folder)
    result = quick(home, capfd, *ALONE, "target=folder", "target.name=mine", f"target.source.path={folder}",
                   "target.mask_token='<|mask|>'", "target.tap_layers=[1,2]")
    assert TARGETS[spoil] in told(*result) and str(folder) in result[2]
    assert not list(home.root.glob("responses/*/responses.jsonl"))


def test_no_work_for_a_server_that_cannot_start(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = told(*quick(home, capfd, *SMOKE, "engine.python=/nonexistent/python"))
    assert "engine.python=/nonexistent/python does not run" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = told(*quick(home, capfd, *SMOKE, f"engine.python={vllm_python()}",
                           f"engine.runtime.port={port}"))
    assert f"engine.runtime.port={port} cannot be used" in line
    assert not home.root.exists()


SETTINGS = {
    "evaluate.k.1": ("evaluate.k=[3,9]",
                     "must lie between 1 and 3, the longest draft of this drafter, but is 9"),
    "export.default_k": ("export.default_k=4", "must lie between 1 and 3, the longest draft of this drafter"),
    "evaluate.format": ("export.formats=[speculators] evaluate.format=native",
                        "must be one of export.formats (speculators), but is native"),
    "prompts.heldout": ("prompts.heldout=0",
                        "must be at least 1, since evaluate measures on held-out prompts, but is 0"),
    "drafter.start_layers": ("drafter.start_layers=[0,1]", "must name one target layer for each of the 1"),
}


def test_settings_that_do_not_go_together(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """All are told at once, by the key that holds the value, whether it is a check or a run."""
    for flags in (["--check"], []):
        given = " ".join(setting for setting, _ in SETTINGS.values()).split()
        status, out, err = quick(home, capfd, *ALONE, *flags, *given)
        found = {line.split()[1]: line for line in err.splitlines()}
        assert status == 2 and not out and found.keys() == SETTINGS.keys(), err
        for key, line in found.items():
            assert line.startswith(f"error: {key} (command line): {SETTINGS[key][1]}"), line
    assert not home.root.exists()


def test_a_drafter_without_an_argument(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = told(*quick(home, capfd, *ALONE, "~drafter.layers"))
    assert line == ("error: drafter.layers (command line): is missing; trainer.architectures.dflash.DFlash "
                    "needs it\n")


def test_given_answers_in_a_recipe_that_samples(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = quick(home, capfd, *ALONE, "--check", "responses=as_given")
    assert status == 0 and out.startswith("the settings are right\n") and err == (
        "note: recipes/smoke.yaml sets responses.sampling for responses=regenerate, which responses=as_given "
        "cannot take and does without\n")


def test_check_tells_all_that_is_not_there(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Files, servers, what the target lacks: at once, also where no fingerprint can be had of a file."""
    missing = ["hidden_states.path=nowhere", "engine.python=/no/python", "target.mask_token=none"]
    told_of = ["hidden_states.path=nowhere", "target.mask_token", "engine.python=/no/python"]
    for first in (["prompts.source.path"], []):
        more = ["prompts=jsonl", "prompts.source.path=none.jsonl"] if first else []
        status, _, err = quick(home, capfd, *SMOKE, "--check", *missing, *more)
        assert status == 2 and [line.split()[1] for line in err.splitlines()] == first + told_of, err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, half a megabyte large."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root alone")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(home: Home, small_disk: Path) -> None:
    """What cannot fit is refused before it is begun; what fills the disk all the same loses nothing."""
    home.root = small_disk / "runs"
    settings = [*ALONE, *COMMITS, "prompts.limit=40", "prompts.heldout=8", "train.steps=20",
                "responses.sampling.max_new_tokens=24", "run=[prompts,responses,hidden_states,train]"]
    home.call(*settings, expected=2)
    line = told(2, home.out, home.err)
    assert "samples take" in line and "set hidden_states.storage=float8_e4m3fn" in line
    kept = (home.stage("responses") / "responses.jsonl").read_bytes()
    assert home.parts("hidden_states") == 0
    # room for the states, and none for a checkpoint
    subprocess.run(["mount", "-o", "remount,size=2300k", str(small_disk)], check=True)
    home.call(*settings, expected=2)
    line = told(2, home.out, home.err)
    assert "the disk is full: stage 'train'" in line and str(small_disk) in line
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    check_went_on(home.call(*settings), "train")
    assert (home.stage("responses") / "responses.jsonl").read_bytes() == kept
