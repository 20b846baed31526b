"""Where files of hidden states pass from a server to this process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import UserError

MEMORY = Path("/dev/shm")
PREFIX = "speculator-trainer-states-"
YOUNG_SECONDS = 60.0


@contextmanager
def private_folder(needed: int) -> Iterator[Path]:
    """A fresh folder with `needed` bytes to spare, in memory if they are free there, removed at the end.

    A lock inside marks it as in use for as long as this process lives; what a killed process left is removed.
    Raises UserError when there is no room.
    """
    places = [place for place in (MEMORY, Path(tempfile.gettempdir()))
              if place.is_dir() and os.access(place, os.W_OK)]
    for place in places:
        _sweep(place)
    roomy = [place for place in places if shutil.disk_usage(place).free >= needed]
    if not roomy:
        free = ", ".join(f"{shutil.disk_usage(place).free >> 20} MiB in {place}" for place in places)
        raise UserError(f"hidden states under way need {needed >> 20} MiB where {free} are free: lower "
                        "target_engine.runtime.in_flight, or set TMPDIR to a folder on a larger disk.")
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=roomy[0]))
    try:
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _sweep(place: Path) -> None:
    for home in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or removed by somebody else
            if home.stat().st_mtime > time.time() - YOUNG_SECONDS:
                continue  # perhaps just made and not locked yet
            with (home / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)


def shared_folder(given: str | None) -> Path:
    """The folder that joined servers write to. Raises UserError unless its files can be read and removed."""
    if given is None:
        raise UserError("servers that hand out hidden states are joined (target_engine.runtime.state_urls), "
                        "but nothing says where their files appear: set target_engine.runtime.shared_folder "
                        "to the folder that they write to, as this machine sees it.")
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"target_engine.runtime.shared_folder={given} is no folder that can be read and "
                        "written here: make or mount it, with the rights of this user.")
    return folder
