"""Folders of results: locks, sums, modes, JSON with a seal, and places that cannot be."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer._folders import (
    change,
    changing,
    locked,
    read_sealed,
    require_folder,
    settle,
    sums,
    usable,
    write_json,
    write_sealed,
)
from trainer.errors import UserError

FORK = multiprocessing.get_context("fork")


def hold(folder: Path, held: Any, release: Any) -> None:
    with locked(folder, "stage 'x'"):
        held.set()
        release.wait(20)


def test_a_lock_keeps_others_out_and_names_its_holder(tmp_path: Path) -> None:
    held, release = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "x", held, release))
    process.start()
    assert held.wait(20)
    said = f"stage 'y' is being written by process {process.pid} on .*; wait until it is done or stop it"
    with pytest.raises(UserError, match=said), locked(tmp_path / "x", "stage 'y'"):
        pass
    process.kill()
    process.join()
    with locked(tmp_path / "x", "stage 'y'"):
        assert (tmp_path / "x.lock").read_text().startswith(f"{os.getpid()} on ")
    assert not (tmp_path / "x.lock").exists()


def count(folder: Path, number: int) -> None:
    for _ in range(number):
        with locked(folder, "counter", wait=True):
            file = folder / "count"
            before = int(file.read_text())
            time.sleep(0.001)
            file.write_text(str(before + 1))


def test_who_waits_for_a_lock_comes_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    others = [FORK.Process(target=count, args=(tmp_path, 20)) for _ in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "count").read_text() == "60"


def test_waiting_says_for_whom(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held, release = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / "x", held, release))
    process.start()
    assert held.wait(20)
    waiting = FORK.Process(target=hold_after, args=(tmp_path / "x",))
    waiting.start()
    said = f"target y is being written by process {process.pid} on "
    deadline, out = time.monotonic() + 20, ""
    while said not in out and time.monotonic() < deadline:
        time.sleep(0.01)
        out += capfd.readouterr().out
    assert said in out and "; waiting until it is done" in out and waiting.is_alive()
    release.set()
    waiting.join(20)
    process.join(20)
    assert (waiting.exitcode, process.exitcode) == (0, 0)


def hold_after(folder: Path) -> None:
    with locked(folder, "target y", wait=True):
        pass


def test_a_lock_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "x.lock").mkdir()
    with pytest.raises(UserError, match=r"x\.lock cannot be written or locked \(Is a directory\); set "
                                        r"cache_root="), locked(tmp_path / "x", "target", "cache_root"):
        pass


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": 2, "b": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                      lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(content=st.dictionaries(st.text().filter(lambda key: key != "checksum"), values), place=st.integers(0))
def test_a_seal_lets_nothing_but_the_same_content_through(tmp_path_factory: pytest.TempPathFactory,
                                                          content: dict[str, Any], place: int) -> None:
    path = tmp_path_factory.getbasetemp() / "sealed.json"
    write_sealed(path, content)
    assert read_sealed(path) == content
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)
    try:
        found = read_sealed(path)
    except ValueError:
        return
    assert found == content or b'"checksum"' not in data, "only the name of the seal may change unseen"


def test_what_is_no_sealed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, said in (("[]", "expected a JSON object, found list"), ("{", "Expecting"), ("\udce9", "utf-8"),
                       ('{"a": 1, "checksum": "00"}', "expected checksum 00, found ")):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=said):
            read_sealed(path)
    path.write_text('{"a": 1}')
    assert read_sealed(path) == {"a": 1}, "from before there were seals"


def result(folder: Path) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/weights").write_bytes(bytes(range(256)) * 5000)
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "shard-0.bin").write_bytes(b"x" * 100)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["deep/weights", "rows.jsonl"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_any_change_of_a_file_is_seen(tmp_path: Path, name: str, damage: Any) -> None:
    folder = result(tmp_path / "folder")
    files = json.loads(json.dumps(sums(folder, ("shard-*.bin",))))
    assert list(files) == ["deep/weights", "rows.jsonl", "shard-0.bin"] and change(folder, files) == ""
    damage(folder / name)
    said = change(folder, files)
    assert said.startswith(f"{folder / name} ") and ", found " in said
    assert f"expected {files[name]['bytes']} bytes of checksum {files[name]['xxh3_64']}" in said


def test_a_file_with_checksums_of_its_own_may_grow_and_not_shrink(tmp_path: Path) -> None:
    folder = result(tmp_path / "folder")
    files = sums(folder, ("shard-*.bin", "deep/*"))
    assert files["shard-0.bin"] == {"bytes": 100, "xxh3_64": None} and not files["deep/weights"]["xxh3_64"]
    (folder / "shard-0.bin").write_bytes(b"y" * 101)
    assert change(folder, files) == ""
    (folder / "shard-0.bin").write_bytes(b"x" * 99)
    assert change(folder, files).endswith("expected 100 bytes, found 99 bytes")


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    there, folder = result(tmp_path / "there"), tmp_path / "here"
    folder.mkdir()
    (folder / "rows.jsonl").symlink_to("../there/rows.jsonl")
    files = sums(folder)
    assert change(folder, files) == ""
    (there / "rows.jsonl").unlink()
    assert "cannot be read (No such file or directory)" in change(folder, files)


def test_settling_takes_any_kind_of_file_and_gives_the_mode_of_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    before = os.umask(0o027)
    try:
        (folder / "inner").mkdir(parents=True)
        (folder / "inner/plain").write_text("x")
    finally:
        os.umask(before)
    (folder / "private").touch(0o600)
    (folder / "broken").symlink_to("nowhere")
    (tmp_path / "elsewhere").touch(0o600)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe", 0o600)
    settle(folder)
    modes = {name: oct((folder / name).lstat().st_mode & 0o777)
             for name in ("private", "inner/plain", "pipe")}
    assert modes == {"private": "0o640", "inner/plain": "0o640", "pipe": "0o600"}
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("given_", "said"), [
    ("", "run_root= is empty, expected a folder"), ("  ", "is empty"),
    ("x" * 300, r"run_root=x{77}\.\.\. cannot hold train \(File name too long\); set run_root="),
    ("/".join(["y" * 200] * 25), r"cannot hold train \(File name too long\)"),
    ("~nobody-of-this-name/runs", "cannot hold train .*home directory"),
    ("file", r"run_root=file cannot hold train \(Not a directory\)"), ("a\0b", "null byte")])
def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_: str,
                               said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UserError, match=said) as caught:
        usable("run_root", given_, "train")
    assert "\n" not in str(caught.value)


def test_places_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usable("run_root", "~/not/yet", "train") == tmp_path / "not/yet"
    require_folder(tmp_path / "not/yet")
    assert usable("run_root", str(tmp_path), "not") == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file, expected a folder or nothing; remove it"):
        require_folder(tmp_path / "file")


def test_a_finished_folder_is_changed_with_its_record(tmp_path: Path) -> None:
    """Killed anywhere between, it is not taken for damaged; what was damaged before is not blessed."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    write_sealed(tmp_path / "stage.json", {"files": sums(tmp_path)})

    def found() -> str:
        return change(tmp_path, read_sealed(tmp_path / "stage.json")["files"])

    with changing(tmp_path, ["a", "none"]):
        assert found() == ""
        (tmp_path / "a").write_text("longer")
        assert found() == ""
        (tmp_path / "a").write_text("")
        assert found() == ""
    assert found() == "" and set(read_sealed(tmp_path / "stage.json")["files"]) == {"a", "b"}
    (tmp_path / "a").write_text("x")
    assert "a is not as it was left" in found()
    with pytest.raises(UserError, match="a is not as it was left"), changing(tmp_path, ["a"]):
        pass
    with changing(tmp_path, ["b"]):
        (tmp_path / "b").write_text("other")
    assert "a is not as it was left" in found()
