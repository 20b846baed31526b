"""The record of a finished folder, its stage.json: what made it, and how its files were left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer import __version__, _folders
from trainer._folders import read_sealed
from trainer.errors import UserError, first_line
from trainer.progress import clock, compact

PACKAGES = ("torch", "transformers", "safetensors", "hydra-core", "numpy")


def fingerprint(settings: Any, version: int, external: dict[str, Any], inputs: dict[str, str],
                idle: Collection[str] = (), neutral: Mapping[str, Any] = MappingProxyType({})) -> str:
    """sha256 of everything that decides the result, in canonical JSON. `idle` are keys within `settings` that
    do not, as in "target.tap_layers"; those of `neutral` do not while they have the value there, so that a
    setting can be added and what was made without it is still found."""
    facts = {"settings": _deciding(settings, idle, neutral), "version": version, "external": external,
             "inputs": inputs}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def finished(folder: Path, expected: str, remove: str = "the folder") -> bool:
    """Whether the folder holds the finished result with this fingerprint; a damaged record is an error."""
    if not folder.exists():
        return False
    try:
        found = read_sealed(folder / "stage.json")["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} exists but its stage.json cannot be read ({first_line(error)}); remove "
                        f"{remove} and run the same command again") from error
    if found != expected:
        raise UserError(f"{folder} was made by fingerprint {found}, not {expected}; remove {remove} and run "
                        f"the same command again")
    return True


def require_unchanged(folder: Path) -> None:
    """Raises when a file of the finished `folder` is not as the stage left it; records of older versions
    name no files, and nothing is compared."""
    if found := _folders.change(folder, read_sealed(folder / "stage.json").get("files", {})):
        raise UserError(f"{found}; remove {folder} and run the same command again")


def versions() -> dict[str, str]:
    """Of this program and what it computes with."""
    found = {"trainer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def made_by() -> dict[str, Any]:
    """What a stage was run by: versions, the commit of this program and the machine."""
    return {"versions": versions(), "commit": commit(), "hardware": hardware()}


def commit() -> str | None:
    """That of the checkout that this program runs from, with "-dirty" where files differ from it; None for an
    installed one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        return told.stdout.strip() or None
    return None


def hardware() -> dict[str, Any]:
    """Processor, cores that may be used, memory in GiB, how many devices PyTorch finds, and what they are
    where this process computes on them: asking opens them, which takes memory there from a server."""
    import torch

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {"processor": processor, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1),
            "devices": (count := torch.cuda.device_count()),
            "device_names": [torch.cuda.get_device_name(each) for each in range(count)]
            if torch.cuda.is_initialized() else []}


def say(name: str, record: dict[str, Any], seconds: float) -> None:
    """Tells whoever watches that a stage is done, with the numbers and the gates of its record."""
    numbers = [f"{key} {compact(value)}" for key, value in record.items() if isinstance(value, (int, float))]
    print(f"{name}: done in {clock(seconds)}" + "".join(f", {number}" for number in numbers[:8]), flush=True)
    for gate, held in record.get("gates", {}).items():
        print(f"  gate {gate}: {held['value']:.6g} {held['comparison']} {held['bound']:.6g}", flush=True)


def _deciding(node: Any, idle: Collection[str] = (), neutral: Mapping[str, Any] = MappingProxyType({}),
              place: str = "") -> Any:
    """What can change the result: nodes without their `runtime`, the keys that only steer the building, and
    those that are `idle` or `neutral`. A dict without `_target_` is the user's own, whatever its keys are
    called."""
    if isinstance(node, dict):
        ours = "_target_" in node
        return {str(key): _deciding(value, idle, neutral, f"{place}{key}.") for key, value in node.items()
                if f"{place}{key}" not in idle
                and not (f"{place}{key}" in neutral and neutral[f"{place}{key}"] == value)
                and (not ours or (
                    key != "runtime" and (not str(key).startswith("_") or key in ("_target_", "_args_"))))}
    return [_deciding(value) for value in node] if isinstance(node, list) else node
