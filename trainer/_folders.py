"""Folders of results: one writer at a time, in place whole or not at all, and read as they were left.

A folder is made under another name by whoever holds its lock and renamed when it is complete. The sums of its
files are kept beside them, so that one that was torn or changed later is told, not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64, xxh3_64_hexdigest

from trainer.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 1 << 20  # with less than this left, any failure to write is taken for a full disk
DEEPEST = "x" * 120  # stands for the paths inside a folder of results


def usable(setting: str, given: str, below: str) -> Path:
    """The folder that a setting names; raises where results in the folder `below` it could never be."""
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    try:
        folder = Path(given).expanduser()
        os.stat(folder / below / DEEPEST)
    except (OSError, RuntimeError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            reason = getattr(error, "strerror", error)
            raise UserError(f"{setting}={shown} cannot hold {below} ({reason}); set {setting}= to a folder "
                            f"that can") from error
    if not given.strip():
        raise UserError(f"{setting}= is empty, expected a folder; set it, or leave it out for the default")
    return folder


def require_writable(setting: str, root: Path, below: str) -> None:
    """Raises unless results can be written into the folder `below` of `root`, which a setting names. Rights
    alone do not tell; what is tried has no name and leaves nothing."""
    folder = root / below
    place = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(f"{setting}={root} cannot be written ({error.strerror}); set {setting}= to a folder "
                        f"that can") from error


@contextlib.contextmanager
def locked(folder: Path, who: str, setting: str = "run_root", wait: bool = False) -> Iterator[None]:
    """Keeps out other processes that ask for the same folder (or file), or waits for the one that has it; a
    process that dies gives its lock up. `setting` says where the folder lies."""
    path = folder.with_name(f"{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = _open_lock(path, fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{who} is being written by process {_holder(path)} ({folder})"
            if not wait:
                raise UserError(f"{busy}; wait until it is done or stop it, then run the same "
                                f"command") from None
            print(f"{busy}; waiting until it is done", flush=True)
            handle = _open_lock(path, 0)
    except OSError as error:
        raise UserError(f"{path} cannot be written or locked ({error.strerror}); set {setting}= to a folder "
                        f"that can") from error
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _open_lock(path: Path, how: int) -> int:
    """The locked file; one that its last holder unlinked in the meantime is not the lock any more."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | how)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip() or "unknown"
    return "unknown"


def require_folder(path: Path) -> None:
    """Makes the folder where there is none; a file in its place is an error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{path} is a file, expected a folder or nothing; remove it and run the same command "
                        f"again") from error


def sums(folder: Path, sized: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Of every file below, by its path there, the bytes and the xxh3_64 in hex; null for those that match a
    glob among `sized`, which have checksums of their own."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            found[name] = _sum(path, any(fnmatch.fnmatchcase(name, glob) for glob in sized))
    return found


@contextlib.contextmanager
def changing(folder: Path, names: Collection[str]) -> Iterator[None]:
    """Files of a finished folder, by their paths in it, may be changed inside: its record lets go of them
    first and takes hold of them again afterwards, so that a kill in between leaves nothing that looks
    damaged. Raises UserError where one is not as it was left."""
    record = read_sealed(folder / "stage.json")
    kept = record.get("files", {})
    changed = [name for name in names if name in kept]
    if found := change(folder, {name: kept[name] for name in changed}):
        raise UserError(f"{found}; remove {folder} and make it again")
    anything = {"bytes": 0, "xxh3_64": None}
    write_sealed(folder / "stage.json", {**record, "files": kept | dict.fromkeys(changed, anything)})
    yield
    write_sealed(folder / "stage.json",
                 {**record, "files": kept | {name: _sum(folder / name) for name in changed}})


def change(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """What is not as `sums` found it, as the beginning of a sentence; "" when all is. A file with checksums
    of its own may have grown."""
    for name, expected in files.items():
        path = folder / name
        try:
            found: dict[str, Any] = {"bytes": path.stat().st_size, "xxh3_64": None}
            if expected["xxh3_64"] and found["bytes"] == expected["bytes"]:
                found["xxh3_64"] = _checksum(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror}): expected {_shown(expected)}, found none"
        if found != expected and (expected["xxh3_64"] or found["bytes"] < expected["bytes"]):
            return f"{path} is not as it was left: expected {_shown(expected)}, found {_shown(found)}"
    return ""


def _sum(path: Path, apart: bool = False) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_64": None if apart else _checksum(path)}


def _shown(sum_: dict[str, Any]) -> str:
    return f"{sum_['bytes']} bytes" + (f" of checksum {sum_['xxh3_64']}" if sum_["xxh3_64"] else "")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxh3_64).hexdigest()  # type: ignore[arg-type]


def settle(folder: Path) -> None:
    """Brings every file below to the disk, so that a rename of the folder cannot outlive what is in it. They
    get the mode that the folder has from the umask: some libraries write through private temporary files.
    Hard links are left as they are, since their files are others', too."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for directory, _, files in os.walk(folder):
        for name in files:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                found = path.stat()
                if found.st_nlink == 1 and stat.S_IMODE(found.st_mode) != mode:
                    path.chmod(mode)
            sync(path)
        sync(Path(directory))


def sync(path: Path) -> None:
    """Brings one file or folder to the disk; links and sockets have nothing to bring."""
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Writes the whole file or nothing."""
    write_text(path, json.dumps(content, indent=2, default=_plain) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the whole file or nothing: beside its place, to the disk, then into its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """The same with a checksum of the content in it."""
    plain = json.loads(json.dumps(content, default=_plain))
    write_json(path, {**plain, "checksum": _seal(plain)})


def read_sealed(path: Path) -> dict[str, Any]:
    """What was written, without the checksum; OSError or ValueError for what is no such file. One without a
    checksum is let through."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    expected, found = content.pop("checksum", None), _seal(content)
    if expected not in (None, found):
        raise ValueError(f"expected checksum {expected}, found {found}")
    return content


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file that people hand over; raises a sentence, which ends with `remedy`, where it
    holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', error)}); {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a JSON object, but holds a {type(found).__name__}; {remedy}")
    return found


def _seal(content: dict[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _plain(value: Any) -> Any:
    """For numbers of numpy and torch, and for paths, among JSON."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")


@contextlib.contextmanager
def full_disk(who: str, folder: Path, setting: str = "run_root") -> Iterator[None]:
    """Says in one sentence when the disk is full; libraries report that in their own words, or not at all."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _tells_of_full_disk(error) or _free_bytes(folder) < FULL_BYTES:
            raise UserError(f"the disk is full: {who} could not go on writing to {folder}; free some space "
                            f"and run the same command to go on, or set {setting}= to another "
                            f"disk") from error
        raise


def _tells_of_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
