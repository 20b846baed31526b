"""Where files of hidden states pass through, and the connector that is put there for a server."""

from __future__ import annotations

import ast
import json
import os
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm_support import small_server

from trainer.engines import states_folder
from trainer.engines.states_folder import PREFIX, private_folder, shared_folder
from trainer.engines.vllm_states import MODULE, Shape, place_connector, start_command, with_connector
from trainer.errors import UserError

OLD = time.time() - 1000


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the folder in memory; the temporary folder is beside it."""
    for name in ("memory", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(states_folder, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "memory"


class TestPrivate:
    def test_it_is_private_and_gone_afterwards(self, memory: Path) -> None:
        with private_folder(1000) as home:
            assert home.parent == memory and stat.S_IMODE(home.stat().st_mode) == 0o700
            (home / "states").mkdir()
            (home / "states/left").write_text("x")
        assert list(memory.iterdir()) == []
        with pytest.raises(ZeroDivisionError), private_folder(1):
            raise ZeroDivisionError
        assert list(memory.iterdir()) == []

    def test_what_a_killed_process_left_is_removed(self, memory: Path) -> None:
        script = ("import sys, time\nfrom pathlib import Path\nfrom trainer.engines import states_folder\n"
                  f"states_folder.MEMORY = Path({str(memory)!r})\n"
                  "with states_folder.private_folder(1) as home:\n"
                  "    print(home, flush=True)\n    time.sleep(60)")
        owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().strip())
            os.utime(left, (OLD, OLD))
            with private_folder(1):
                assert left.is_dir(), "in use"
        finally:
            owner.kill()
            owner.wait()
        os.utime(left)
        with private_folder(1):
            assert left.is_dir(), "too young to tell"
        os.utime(left, (OLD, OLD))
        with private_folder(1):
            assert not left.exists()

    def test_others_are_left_alone(self, memory: Path) -> None:
        (memory / "other").mkdir()
        (memory / f"{PREFIX}without-lock").mkdir()
        for path in memory.iterdir():
            os.utime(path, (OLD, OLD))
        with private_folder(1):
            assert len(list(memory.iterdir())) == 3

    def test_disk_where_memory_is_small(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = {memory: 100, memory.parent / "temporary": 1000}
        monkeypatch.setattr(states_folder.shutil, "disk_usage", lambda place: Usage(usage[place]))
        with private_folder(100) as home:
            assert home.parent == memory
        with private_folder(101) as home:
            assert home.parent.name == "temporary"
        with pytest.raises(UserError, match=r"need 0 MiB where 0 MiB in \S+memory, 0 MiB in \S+temporary "
                           "are free: lower target_engine.runtime.in_flight, or set TMPDIR"), \
                private_folder(1001):
            pass


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@contextmanager
def nobody_in_particular() -> Iterator[None]:
    """Rights count for anybody but the superuser."""
    if os.getuid() != 0:
        yield
        return
    try:
        os.setresuid(65534, -1, -1)  # that the kernel goes by for os.access
        yield
    finally:
        os.setresuid(0, -1, -1)


def test_a_shared_folder_must_be_usable(tmp_path: Path) -> None:
    assert shared_folder(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    for given in ("file", "missing", "file/below"):
        with pytest.raises(UserError, match=f"shared_folder=.*{given} is no folder that can be read"):
            shared_folder(str(tmp_path / given))
    with tempfile.TemporaryDirectory() as readable, nobody_in_particular():
        Path(readable).chmod(0o555)
        with pytest.raises(UserError, match="is no folder that can be read and written here: make or mount"):
            shared_folder(readable)
    with pytest.raises(UserError, match="nothing says where"):
        shared_folder(None)


class TestConnector:
    def test_it_stands_alone(self, tmp_path: Path) -> None:
        folder = place_connector(tmp_path / "connector")
        assert [path.name for path in folder.iterdir()] == [f"{MODULE}.py"], "nothing else of ours beside it"
        tree = ast.parse((folder / f"{MODULE}.py").read_text())
        assert "HiddenStatesConnector" in [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        before = (folder / f"{MODULE}.py").stat().st_mtime_ns
        place_connector(folder)
        assert (folder / f"{MODULE}.py").stat().st_mtime_ns == before, "servers may be reading it"
        (folder / f"{MODULE}.py").write_text("old")
        place_connector(folder)
        assert ast.parse((folder / f"{MODULE}.py").read_text()).body

    def test_the_server_gets_the_layers_twice_and_one_search_path(self, tmp_path: Path) -> None:
        plain = small_server(arguments=["--seed", "1"], environment={"PYTHONPATH": "/mine", "A": "b"})
        given = with_connector(plain, tmp_path / "states", tmp_path / "connector", [2, 30], batch=1)
        assert given.environment == {"PYTHONPATH": f"{tmp_path}/connector:/mine", "A": "b"}
        assert given.arguments[:2] == ["--seed", "1"] and "--no-enable-prefix-caching" in given.arguments
        told = dict(zip(given.arguments[:-1], given.arguments[1:], strict=True))
        draft = json.loads(told["--speculative-config"])["draft_model_config"]
        transfer = json.loads(told["--kv-transfer-config"])
        assert draft["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30]
        assert transfer["kv_connector_extra_config"] == {"folder": f"{tmp_path}/states", "layers": [2, 30]}
        assert transfer["kv_connector_module_path"] == MODULE
        words = given.command("python", tmp_path, 8000)
        assert words[words.index("--max-num-seqs") + 1] == "1"
        assert plain.arguments == ["--seed", "1"] and plain.max_num_seqs == 4

    def test_the_command_to_type_is_the_one_that_would_be_run(self, tmp_path: Path) -> None:
        given = with_connector(small_server(), tmp_path / "a b", tmp_path / "c d", [2, 30], 8)
        words = shlex.split(start_command(given, tmp_path))
        assert words[:3] == [f"PYTHONPATH={tmp_path}/c d", "vllm", "serve"]
        assert words[2:] == given.command("python", tmp_path, 8000)[3:]


def test_the_shape_of_nested_and_plain_configurations(tmp_path: Path) -> None:
    plain = {"num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 50, "max_position_embeddings": 64}
    for config in (plain, {"text_config": plain, "hidden_size": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = Shape.read(tmp_path, "bfloat16")
        assert shape == Shape(3, 8, 50, "bfloat16", 64)
    assert shape.bytes_per_token(3) == 48
    assert [shape.with_room(length) for length in (63, 64)] == [64, 64], "the model has no more"
    assert Shape(3, 8, 50, "float32").with_room(64) == 65
