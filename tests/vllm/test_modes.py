"""Training from a real vLLM, through the command line: the same weights from every source of hidden states,
whatever happens to the server on the way.

One server stands by for all runs, joined directly or through a gate that can be shut; the run whose server is
killed starts its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gate import Gate
from runs import PATIENCE, Home, quick, wait_until
from vllm_support import FEW, kill_worker, own_cores, small_server, vllm_python

from trainer.__main__ import main
from trainer._paths import find
from trainer.compose import compose_configuration
from trainer.engines import states_folder, vllm_client, vllm_pool, vllm_process
from trainer.engines.vllm_server import RunningServer
from trainer.engines.vllm_states import place_connector, with_connector
from trainer.pipeline import build

pytestmark = pytest.mark.vllm
LONGEST, BEFORE = 1024, ("prompts", "responses", "hidden_states")
SETTINGS = ["recipe=smoke", "hardware.compile=false", "target_engine=vllm", "target_engine.dtype=float32",
            f"target.max_length={LONGEST}", *FEW,
            f"engine.runtime.threads='{own_cores()[0]}'", "engine.runtime.kv_cache_gib=1",
            "prompts.limit=24", "prompts.heldout=4", "responses.sampling.max_new_tokens=12",
            "train.tokens=640", "train.steps=24", "train.heldout_every=12",
            "train.runtime.checkpoint_every=4"]
IN_FLIGHT = {"offline": 8, "hybrid": 5, "online": 2}  # no matter


def command(*more: str) -> list[str]:
    return [*SETTINGS, f"engine.python={vllm_python()}", *more]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("server")
    settings = compose_configuration([*SETTINGS, f"cache_root={cache}"], find()).settings
    target = build(settings["target"])
    plain = small_server(python=vllm_python(), max_model_len=LONGEST + 1)
    given = with_connector(plain, home / "shared", place_connector(home / "connector"), [1, 2, 3], batch=1)
    with given.serve(target.folder, home / "states.log") as running:
        yield running


def joined(server: RunningServer, url: str | None = None) -> list[str]:
    shared = server.log.parent / "shared"
    return [f"target_engine.runtime.answer_urls=[{url or server.url}]",
            f"target_engine.runtime.state_urls=[{url or server.url}]",
            f"target_engine.runtime.shared_folder={shared}"]


@pytest.fixture(scope="module")
def modes(server: RunningServer, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Runs in all modes, below one root: the same answers to the same prompts."""
    home = Home(tmp_path_factory.mktemp("modes"), cache)
    for mode, in_flight in IN_FLIGHT.items():
        assert main(home.arguments(*command(
            *joined(server), f"hidden_states={mode}", f"target_engine.runtime.in_flight={in_flight}",
            f"run=[{','.join(BEFORE)},train]"))) == 0
        shutil.copy(home.root / "latest.json", home.root / f"{mode}.json")
    return home


def stage(home: Home, mode: str, name: str) -> Path:
    return Path(json.loads((home.root / f"{mode}.json").read_text())[name])


def weights(home: Home, mode: str) -> bytes:
    return (stage(home, mode, "train") / "weights.safetensors").read_bytes()


def test_the_same_weights_from_every_source(modes: Home) -> None:
    assert len({stage(modes, mode, "train") for mode in IN_FLIGHT}) == 3, "three trainings"
    assert len({stage(modes, mode, "responses") for mode in IN_FLIGHT}) == 1, "of the same samples"
    found = [weights(modes, mode) for mode in IN_FLIGHT]
    assert found[0] == found[1], "hybrid is offline to the bit"
    assert found[0] == found[2], "online is offline to the bit"
    sizes = {mode: sum(path.stat().st_size for path in stage(modes, mode, "hidden_states").glob("shard-*"))
             for mode in IN_FLIGHT}
    assert sizes["online"] == 0 and abs(sizes["hybrid"] - sizes["offline"]) < 4096, \
        "every sample once, whichever is the last, which alone is not filled up to the alignment"


@pytest.fixture
def home(modes: Home, cache: Path, tmp_path: Path) -> Home:
    """All that comes before online training is there."""
    made = Home(tmp_path / "home", cache)
    for name in BEFORE:
        folder = stage(modes, "online", name)
        shutil.copytree(folder, made.root / name / folder.name)
    return made


def online(*more: str) -> list[str]:
    return command("hidden_states=online", "run=[train]", "target_engine.runtime.in_flight=2", *more)


def test_a_started_server_killed_in_the_middle(modes: Home, home: Home) -> None:
    before = passing_through()
    run = home.start(*online())
    try:
        wait_until(lambda: home.parts("train") > 0, run.is_alive, home)
        killed = servers(run.pid)
        assert len(killed) == 1
        kill_worker(killed[0])
        run.join(timeout=PATIENCE)
    finally:
        run.kill()
    assert run.exitcode == 0, home.err
    lost, back = said(home.err)
    assert "the vLLM server ended with" in lost, "what happened"
    assert lost.endswith("Trying again for up to 600 s (target_engine.runtime.patience_s).")
    assert back.endswith("answers again.")
    assert {path.name for path in (home.root / "target_engine").glob("*.log")} == {"states-1.log",
                                                                                  "states-2.log"}
    assert (home.stage("train") / "weights.safetensors").read_bytes() == weights(modes, "online")
    assert vllm_process.members(killed[0]) == [] and passing_through() == before, "nothing is left"


def said(err: str) -> list[str]:
    """Without how long a start took."""
    return [line for line in err.splitlines() if not line.startswith(("starting", "vLLM server for"))]


def servers(process: int) -> list[int]:
    """The process groups of vLLM servers that a process started, in any of its threads."""
    return [int(child) for task in Path(f"/proc/{process}/task").iterdir()
            for child in (task / "children").read_text().split()
            if "vllm_process.py" in Path(f"/proc/{child}/cmdline").read_text()]


def passing_through() -> set[Path]:
    return set(states_folder.MEMORY.glob(f"{states_folder.PREFIX}*"))


def test_a_joined_server_lost_for_longer_than_we_wait(
        modes: Home, home: Home, server: RunningServer, capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "RETRY_SECONDS", (0.01,))
    monkeypatch.setattr(vllm_pool, "FIRST_PAUSE", 0.1)
    with Gate(server.url) as gate:
        gate.cut_when = lambda: home.parts("train") > 0
        given = online(*joined(server, gate.url), "target_engine.runtime.patience_s=1")
        status, out, err = quick(home, capfd, *given)
        assert status == 2 and "Traceback" not in out + err
        *before, last = said(err)
        assert len(before) == 1 and before[0].startswith(f"the server at {gate.url} does not answer")
        assert before[0].endswith("Trying again for up to 1 s (target_engine.runtime.patience_s).")
        assert last.startswith("error: a server was lost and did not come back within "
                               f"target_engine.runtime.patience_s=1 s: the server at {gate.url} does not")
        assert last.endswith("then run the same command again.")
        kept = home.parts("train")
        assert kept > 0
        gate.cut_when = lambda: False
        gate.open()
        status, out, err = quick(home, capfd, *given)
    assert status == 0 and said(err) == []
    assert f"train: going on after step {kept - 1} of 24" in out
    assert (home.stage("train") / "weights.safetensors").read_bytes() == weights(modes, "online")
    assert not list((server.log.parent / "shared").glob("*.safetensors*")), "nor is anything left behind"
