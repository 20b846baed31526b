"""A file system of its own for a test; the fixture `disk` gives one of 100 kB."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)],
                      capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, *options: str) -> None:
    """With another size (`size=1m`), or read-only (`ro`)."""
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), str(folder)], check=True)
