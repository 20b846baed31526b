"""The command line: a named repository ends the run, and what was killed on the way goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
from hub_support import REPO, TOKEN, Hub
from runs import PATIENCE, SMOKE, Home
from safetensors.torch import save_file
from test_upload import contents, copy_of

from trainer.target import Hub as HubTarget
from trainer.target import Target

TRAINED = ["run=[prompts,responses,hidden_states,train,export]", "prompts.limit=12", "prompts.heldout=2",
           "train.steps=6", "export.target_name=org/target", "+engine.environment.SOME_API_KEY=sesame"]
BEHIND = ("prompts", "responses", "hidden_states", "train")
UPLOADED = [f"export.hub.repo={REPO}", "export.hub.license=mit"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "place", tmp_path / "cache")


def call(home: Home, *settings: str, status: int = 0) -> str:
    """A process that a user starts: this one has asked for the addresses of the Hub already."""
    with home.shell(*settings) as process:
        assert process.wait(timeout=PATIENCE) == status, home.out + home.err
    return home.out


def test_a_named_repository_ends_the_run(home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `repeat` in provenance.json is the run again: every stage has the same fingerprint."""
    out = call(home, *SMOKE, *TRAINED, *UPLOADED)
    export = home.stage("export")
    assert [line.split()[0] for line in out.splitlines() if "done in" in line][-1] == "upload:"
    assert f"uploaded: {hub.url}/{REPO} (private)" in out
    found = hub.files()
    assert {name: content for name, content in found.items() if name != "README.md"} == {
        name: content for name, content in contents(export / "speculators").items() if name != "README.md"}
    assert "license: mit" in found["README.md"].decode()
    for path in [path for path in home.folder.rglob("*") if path.is_file()]:
        assert TOKEN.encode() not in path.read_bytes() and b"sesame" not in path.read_bytes(), path

    monkeypatch.delenv("HF_TOKEN")  # the default run uploads nothing, and needs no token
    made = json.loads(found["provenance.json"])
    assert made["repeat"].startswith("python -m trainer recipe=smoke hardware.compile=false prompts.limit=12")
    said = shlex.split(made["repeat"])[3:]
    words = [word for word in said if "API_KEY" not in word]
    assert {*said} - {*words} == {"+engine.environment.SOME_API_KEY=***"} and "hub" not in made["repeat"]
    out = call(home, "--check", *words, TRAINED[0])
    states = dict(line.split()[:2] for line in out.splitlines()[1:6])
    assert states == dict.fromkeys((*BEHIND, "export"), "reuse") and "upload" not in out, out
    assert {name: stage["fingerprint"][:16] for name, stage in made["stages"].items()} == {
        name: home.stage(name).name for name in BEHIND}

    call(home, *SMOKE, *TRAINED, *UPLOADED, status=2)
    assert home.err.startswith(f"error: export.hub.repo={REPO} needs a token for the Hub, and there is none")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    sent = hub.asked("PUT", "/lfs/")
    call(home, *SMOKE, *TRAINED, *UPLOADED, "run=[upload]")
    assert hub.asked("PUT", "/lfs/") == sent and len(hub.repo()["titles"]) == 2


def test_a_killed_upload_goes_on_with_what_is_missing(home: Home, hub: Hub, exported: Path,
                                                      tmp_path: Path) -> None:
    mine = copy_of(exported, tmp_path)
    drawn = torch.Generator().manual_seed(1)
    for name in ("model.safetensors", "more.safetensors"):
        save_file({name: torch.randint(0, 256, (500_000,), generator=drawn).byte()}, mine / name)
    given = [*SMOKE, "run=[upload]", f"upload.folder={mine}", f"export.hub.repo={REPO}"]
    first, second = (hashlib.sha256((mine / name).read_bytes()).hexdigest()
                     for name in ("model.safetensors", "more.safetensors"))
    hub.order({"method": "PUT", "path": second, "hold": 100_000})
    with home.shell(*given) as process:
        deadline = time.monotonic() + PATIENCE
        while not hub.ask("/_held"):
            assert process.poll() is None and time.monotonic() < deadline, home.out + home.err
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    assert hub.repo()["titles"] == ["initial commit"], "nothing of it is seen before all of it is there"
    out = call(home, *given)
    assert len(hub.asked("PUT", first)) == len(hub.asked("PUT", second)) == 1
    assert hub.files() == contents(mine)
    assert out.splitlines()[0].split()[:2] == ["recipe", "smoke"] and "export" not in out.split(str(mine))[0]


def test_a_target_of_the_hub_knows_its_commit(hub: Hub, tiny_target: Target, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cached"))
    HfApi().create_repo("tester/target", private=True)
    HfApi().upload_folder(repo_id="tester/target", folder_path=tiny_target.folder)
    source = HubTarget("tester/target", "main")
    assert source.commit == hub.repo("tester/target")["refs"]["main"] and source.served == "tester/target"
    assert Target("t", source, "<|mask|>", [1], {}, 64, False).identity == tiny_target.identity
    assert tiny_target.source.commit is None
