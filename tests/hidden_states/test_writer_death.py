"""What was committed survives every kind of death, and the next writer goes on to the same bytes.

Writers that die are processes of their own, forked from a server that has imported torch already.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import remount
from forks import FORKS
from stored_states import LAYERS, contents, equal, extract, index_of, make, random_states
from tiny import random_samples, states_of
from written_states import CODEC, MANIFEST, MANY, SAMPLES, SHARD_BYTES, append_all, check

from trainer.errors import UserError
from trainer.hidden_states import base, writer
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.index import index_path
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.writer import ShardWriter
from trainer.target import Target


class Dying:
    """`os` as the writer sees it, up to its last call: that one is made in part, and then the process is
    killed."""

    def __init__(self, calls: int, share: float) -> None:
        self.left, self.share, self.made = calls, share, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counting(name, real) if callable(real) and name != "getpid" else real

    def _counting(self, name: str, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.made += 1
            if self.made > self.left:
                if name == "pwrite":
                    file, data, offset = arguments
                    real(file, data[:int(self.share * len(data))], offset)
                elif self.share > 0.5:
                    real(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        return call


def die(folder: Path, log: Path, calls: int, share: float) -> None:
    torch.set_num_threads(1)
    writer.os = base.os = Dying(calls, share)  # type: ignore[assignment]
    append_all(folder, log=log)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many calls an unbroken writer makes."""
    counting = Dying(1_000_000, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "os", counting)
        patch.setattr(base, "os", counting)
        append_all(tmp_path_factory.mktemp("counted"))
    assert counting.made > 100
    return counting.made


@pytest.mark.parametrize("point", range(20))
def test_a_killed_writer_loses_nothing_that_was_committed(tmp_path: Path, unbroken: dict[str, bytes],
                                                          calls: int, point: int) -> None:
    """SIGKILL at a random point, in the middle of a write among others; killed twice before it gets
    through."""
    draw, folder, log = random.Random(point), tmp_path / "states", tmp_path / "log"
    folder.mkdir()
    for limit in (calls, calls // 2):
        process = FORKS.Process(target=die, args=(folder, log, draw.randrange(limit), draw.random()))
        process.start()
        process.join(60)
        if process.exitcode == 0:  # the second one had little left to do
            break
        assert process.exitcode == -signal.SIGKILL
        committed = log.read_text().split() if log.exists() else []
        if Manifest.path(folder).exists():
            check(folder, [sample for sample in SAMPLES if sample.id in committed])
        else:
            assert not committed
    append_all(folder)
    assert contents(folder) == unbroken
    check(folder, SAMPLES)


ANSWERS = random_samples([9 + number % 13 for number in range(45)], prompt=4, seed=6)


def stage(target: Target) -> Any:
    return make("offline", target, LAYERS, runtime={"shard_gib": 60_000 / (1 << 30), "commit_tokens": 1})


def extract_and_die(target: Target, folder: Path, calls: int, share: float) -> None:
    torch.set_num_threads(1)
    writer.os = base.os = Dying(calls, share)  # type: ignore[assignment]
    extract(stage(target), folder, ANSWERS)


def test_an_extraction_killed_again_and_again_ends_with_the_same_bytes(tiny_target: Target,
                                                                       tmp_path: Path) -> None:
    """The stage itself, with its engine, killed at 20 random points before it is left alone. What was once
    committed is there after every death."""
    extract(stage(tiny_target), tmp_path / "whole/states", ANSWERS)
    folder, draw = tmp_path / "parts/states", random.Random(0)
    folder.mkdir(parents=True)
    expected = dict(zip(ANSWERS, states_of(tiny_target, ANSWERS, LAYERS), strict=True))
    before = 0
    for _ in range(20):
        process = FORKS.Process(target=extract_and_die,
                                args=(tiny_target, folder, draw.randrange(3, 26), draw.random()))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        if not Manifest.path(folder).exists():
            continue
        committed = [sample for sample in ANSWERS if index_of(folder).find(sample.id)]
        assert len(committed) >= before
        before, reader = len(committed), ShardReader(folder, verify="always")
        for sample in committed:
            state = reader.codec.roundtrip(expected[sample], sample.loss_mask)
            assert equal(reader.get(sample), state), sample.id
    assert 0 < before < len(ANSWERS), "it was stopped on its way"
    extract(stage(tiny_target), folder, ANSWERS)
    assert contents(folder) == contents(tmp_path / "whole/states")


# readers at the same time


def follow(folder: Path, ready: Any, seen: Any) -> None:
    """Reads every sample as soon as it is there; puts how often it had to wait."""
    torch.set_num_threads(1)
    reader, waits = ShardReader(folder, verify="always"), 0
    ready.release()
    for sample in MANY:
        while True:
            try:
                found = reader.get(sample)
                break
            except UserError as error:
                assert "has no hidden states of sample" in str(error), error
                waits += 1
        expected = CODEC.roundtrip(random_states(CODEC, sample), sample.loss_mask)
        assert equal(found, expected), sample.id
    seen.put(waits)


def test_two_processes_read_while_one_writes(tmp_path: Path) -> None:
    ready, seen = FORKS.Semaphore(0), FORKS.Queue()
    with ShardWriter(tmp_path, MANIFEST, SHARD_BYTES) as made:
        readers = [FORKS.Process(target=follow, args=(tmp_path, ready, seen)) for _ in range(2)]
        for process in readers:
            process.start()
        for _ in readers:
            assert ready.acquire(timeout=60)
        for number, sample in enumerate(MANY):
            made.append(sample, random_states(CODEC, sample))
            if number % 4 == 0:
                made.commit()
    waits = [seen.get(timeout=60) for _ in readers]
    for process in readers:
        process.join(60)
    assert [process.exitcode for process in readers] == [0, 0]
    assert min(waits) > 0, "they were faster than the writer, so they read what was just written"


# disks


def write_until_full(folder: Path, limit: int) -> None:
    """Exit status: the number of the error."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        append_all(folder, every=2)
    except OSError as error:
        os._exit(error.errno)


@pytest.mark.parametrize("limit", [600, 3000, 9000, 16_000])
def test_a_file_that_may_not_grow_leaves_what_was_committed(tmp_path: Path, unbroken: dict[str, bytes],
                                                            limit: int) -> None:
    """The limit is met in a shard, in the middle of a write; by the smaller ones before the first commit."""
    folder = tmp_path / "states"
    folder.mkdir()
    MANIFEST.write(folder)
    process = FORKS.Process(target=write_until_full, args=(folder, limit))
    process.start()
    process.join(60)
    assert process.exitcode == errno.EFBIG
    with ShardWriter(folder, MANIFEST, SHARD_BYTES) as made:
        stored = [sample for sample in SAMPLES if made.has(sample.id)]
    assert (len(stored) > 0) == (limit > 3000) and len(stored) < len(SAMPLES)
    check(folder, stored)
    append_all(folder)
    assert contents(folder) == unbroken


def test_a_full_disk_leaves_what_was_committed(disk: Path, tmp_path: Path) -> None:
    folder = disk / "states"
    folder.mkdir()
    with pytest.raises(OSError, match="No space left"):
        append_all(folder, MANY, every=2)
    with pytest.raises(OSError, match="No space left"):
        append_all(folder, MANY, every=2)  # a second try makes nothing worse
    stored = [sample for sample in MANY if ShardReader(folder).index.find(sample.id)]
    assert 0 < len(stored) < len(MANY)
    check(folder, stored)
    remount(disk, "size=10m")
    append_all(folder, MANY)
    other = tmp_path / "states"
    other.mkdir()
    append_all(other, MANY)
    assert contents(folder) == contents(other)


def test_a_folder_that_may_not_be_written_can_be_read(disk: Path) -> None:
    folder = disk / "states"
    folder.mkdir()
    append_all(folder, SAMPLES[:4])
    remount(disk, "ro")
    check(folder, SAMPLES[:4])
    with pytest.raises(UserError, match=rf"^{index_path(folder)} cannot be written \(Read-only file "
                                        r"system\); hidden states stored there can be read but not extended: "
                                        "make the"):
        ShardWriter(folder, MANIFEST, SHARD_BYTES)
    with pytest.raises(UserError, match=rf"^{disk} cannot be written \(Read-only file system\)"):
        ShardWriter(disk, MANIFEST, SHARD_BYTES)
