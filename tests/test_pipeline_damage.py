"""Finished stages whose files changed afterwards: told with the folder to remove, used by nobody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import CALLS, Make, folders, quiet, settings  # noqa: F401 (quiet is a fixture)

from trainer import pipeline
from trainer.errors import UserError
from trainer.pipeline import plan


def test_a_record_that_was_changed_and_a_file_in_the_way() -> None:
    """Before the rename as after it; the stage is not run again, as its work is all there."""
    pipeline.run(settings())
    make = plan(settings())[0]
    record = make.folder / "stage.json"
    record.write_text(record.read_text().replace('"size": 3', '"size": 4'))
    with pytest.raises(UserError, match=r"cannot be read \(expected checksum \w+, found \w+\); remove the "):
        pipeline.run(settings())
    make.folder.rename(make.partial)
    with pytest.raises(UserError, match=r"\.partial exists but its stage.json cannot be read .*; remove tha"):
        pipeline.run(settings())
    assert CALLS == ["make", "use"]
    record = make.partial / "stage.json"
    record.unlink()
    make.partial.rename(make.folder)
    make.partial.touch()
    (make.folder / "items.txt").unlink()
    make.folder.rmdir()
    with pytest.raises(UserError, match=f"{make.partial} is a file, expected a folder or nothing; remove it"):
        pipeline.run(settings())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_text("xx")])
@pytest.mark.parametrize("stages", [("make", "use"), ("use",), ("make",)])
def test_a_result_that_changed_is_used_by_nobody(damage: Callable[[Path], Any],
                                                 stages: tuple[str, ...]) -> None:
    """Neither where the stage is reused, nor where another reads it for the first time."""
    pipeline.run(settings(stages=("make",)))
    items = folders(settings())["make"] / "items.txt"
    damage(items)
    with pytest.raises(UserError, match=f"{items} .*expected 3 bytes of checksum .*found .*; remove "
                                        f"{items.parent} and run the same command again"):
        pipeline.run(settings(stages=stages))
    assert CALLS == ["make"]
    shutil.rmtree(items.parent)
    pipeline.run(settings())
    assert CALLS == ["make", "make", "use"]


def test_a_result_that_nobody_reads_may_be_gone() -> None:
    pipeline.run(settings())
    make = folders(settings())["make"]
    (make / "items.txt").unlink()
    assert pipeline.run(settings(stages=("use",))) == folders(settings())["use"]
    shutil.rmtree(make)
    assert pipeline.run(settings(stages=("use",))) == folders(settings())["use"]


def test_a_record_of_an_older_version_names_no_files_and_is_read() -> None:
    pipeline.run(settings(stages=("make",)))
    path = folders(settings())["make"] / "stage.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: record[name] for name in record if name not in ("files", "checksum")}))
    pipeline.run(settings())
    assert CALLS == ["make", "use"]


def test_files_with_checksums_of_their_own_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Make, "sized", ("*.txt",))
    pipeline.run(settings(stages=("make",)))
    items = folders(settings())["make"] / "items.txt"
    items.write_text("xyxy")
    pipeline.run(settings())
    items.write_text("xx")
    with pytest.raises(UserError, match="expected 3 bytes, found 2 bytes; remove"):
        pipeline.run(settings())
