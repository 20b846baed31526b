"""Writing is append and commit: what a writer takes, where it puts it, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import FORKS
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_states import contents, random_states
from written_states import CODEC, MANIFEST, SAMPLES, SHARD_BYTES, append_all, check

from trainer.errors import UserError
from trainer.hidden_states.index import index_path
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import shard_numbers, shard_path
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, len(SAMPLES)), max_size=4), st.integers(1, 5))
def test_interruptions_leave_no_trace(tmp_path_factory: pytest.TempPathFactory, unbroken: dict[str, bytes],
                                      stops: list[int], every: int) -> None:
    """A writer that ends after any number of samples, with and without a commit, and with any rhythm."""
    folder = tmp_path_factory.mktemp("states")
    for number, stop in enumerate(stops):
        made = ShardWriter(folder, MANIFEST, SHARD_BYTES)
        for sample in [sample for sample in SAMPLES if not made.has(sample.id)][:stop]:
            made.append(sample, random_states(CODEC, sample))
        if number % 2:
            made.commit()
        made.close()
    append_all(folder, every=every)
    assert contents(folder) == unbroken


def test_samples_are_not_there_before_their_commit(tmp_path: Path) -> None:
    made = ShardWriter(tmp_path, MANIFEST, 1 << 20)
    reader = ShardReader(tmp_path)
    made.append(SAMPLES[0], random_states(CODEC, SAMPLES[0]))
    made.append(SAMPLES[1], random_states(CODEC, SAMPLES[1]))
    assert not made.has("s0")
    with pytest.raises(UserError, match="has no hidden states of sample s0: expected its record in .*, found "
                                        "0 "):
        reader.get(SAMPLES[0])
    made.commit()
    made.append(SAMPLES[2], random_states(CODEC, SAMPLES[2]))
    assert made.has("s0") and made.has("s1") and not made.has("s2")
    check(tmp_path, SAMPLES[:2])
    reader.get(SAMPLES[1])
    made.close()
    with ShardWriter(tmp_path, MANIFEST, 1 << 20) as made:
        assert not made.has("s2")


def test_an_exception_keeps_what_is_whole_and_an_error_of_the_disk_what_is_safe(tmp_path: Path) -> None:
    for number, error in enumerate((KeyboardInterrupt(), UserError("x"), OSError(errno.EIO, "x"))):
        with pytest.raises(type(error)), ShardWriter(tmp_path, MANIFEST, 1 << 20) as made:
            made.append(SAMPLES[number], random_states(CODEC, SAMPLES[number]))
            raise error
    with ShardWriter(tmp_path, MANIFEST, 1 << 20) as made:
        assert [made.has(f"s{number}") for number in range(3)] == [True, True, False]


# shards


@pytest.mark.parametrize("limit", [1, 5000, 20_000, 1 << 30])
def test_a_shard_grows_up_to_its_limit(tmp_path: Path, limit: int) -> None:
    with ShardWriter(tmp_path, MANIFEST, limit) as made:
        sizes = []
        for sample in SAMPLES:
            made.append(sample, random_states(CODEC, sample))
            sizes.append(made.size(sample))
    files = [shard_path(tmp_path, number).stat().st_size for number in shard_numbers(tmp_path)]
    check(tmp_path, SAMPLES)
    assert max(files) <= max(limit, max(sizes))
    assert len(files) == len(SAMPLES) if limit == 1 else len(files) >= sum(sizes) // (limit + 4096)
    assert sum(files) <= sum(sizes) < sum(files) + 4096 * len(files)


@pytest.mark.parametrize("change", [{"taps": slice(0, 16)}, {"taps": slice(16, 32)}, {"last": slice(0, 16)}])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_nothing_bad_is_stored(tmp_path: Path, change: dict[str, slice], value: float) -> None:
    [(part, columns)] = change.items()
    states = random_states(CODEC, SAMPLES[1])
    getattr(states, part)[5, columns] = value
    with ShardWriter(tmp_path, MANIFEST, 1 << 20) as made:
        made.append(SAMPLES[0], random_states(CODEC, SAMPLES[0]))
        with pytest.raises(UserError, match=r"1 rows of hidden states are all zero or not finite \(sample "
                                            r"s1\); exp"):
            made.append(SAMPLES[1], states)
        with pytest.raises(UserError, match="the engine returned taps .* for sample s2, expected"):
            made.append(SAMPLES[2], states)
        with pytest.raises(AssertionError, match="'s0' cannot be added"):
            made.append(SAMPLES[0], random_states(CODEC, SAMPLES[0]))
    check(tmp_path, SAMPLES[:1])


@pytest.mark.parametrize("damage", ["a shard cut", "a shard gone", "a shard grown", "shards without records"])
def test_a_damaged_folder_is_not_written_to(tmp_path: Path, damage: str) -> None:
    append_all(tmp_path)
    first = shard_path(tmp_path, 0)
    size = first.stat().st_size
    if damage == "a shard cut":
        os.truncate(first, size - 1)
        said = f"{first} does not fit index.bin: expected {size} bytes, found {size - 1}; remove"
    elif damage == "a shard gone":
        first.unlink()
        said = f"{first} does not fit index.bin: expected {size} bytes, found 0; remove"
    elif damage == "a shard grown":
        os.truncate(first, size + 9)
        said = f"{first} does not fit index.bin: expected {size} bytes, found {size + 9}; remove"
    else:
        index_path(tmp_path).write_bytes(b"")
        said = f"{shard_path(tmp_path, 1)} does not fit index.bin: expected 0 bytes, found "
    before = contents(tmp_path)
    with pytest.raises(UserError, match=said):
        ShardWriter(tmp_path, MANIFEST, SHARD_BYTES)
    assert contents(tmp_path) == before


# others at the same time


def hold(folder: Path, ready: Any) -> None:
    with ShardWriter(folder, MANIFEST, SHARD_BYTES):
        ready.set()
        time.sleep(600)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    append_all(tmp_path, SAMPLES[:3])
    before = contents(tmp_path)
    ready = FORKS.Event()
    process = FORKS.Process(target=hold, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(UserError, match=f"^{tmp_path} is being written by another process, which holds "
                                            "the lock of index.bin; expected no other writer: wait until it "
                                            "is done or stop it"):
            ShardWriter(tmp_path, MANIFEST, SHARD_BYTES)
        check(tmp_path, SAMPLES[:3])  # reading needs no lock
        assert contents(tmp_path) == before
        process.kill()
        process.join(60)
        append_all(tmp_path)  # a killed one holds nothing
    finally:
        process.kill()
    check(tmp_path, SAMPLES)


def test_a_folder_of_other_states_is_not_written(tmp_path: Path) -> None:
    append_all(tmp_path, SAMPLES[:2])
    with pytest.raises(UserError, match=r"choice of layers: expected \[1, 4\], found \[1, 3\]"):
        ShardWriter(tmp_path, replace(MANIFEST, tap_layers=[1, 4]), SHARD_BYTES)


def test_the_lock_is_given_up_when_opening_fails(tmp_path: Path) -> None:
    append_all(tmp_path)
    os.truncate(shard_path(tmp_path, 0), 10)
    for _ in range(2):
        with pytest.raises(UserError, match="does not fit index.bin"):
            ShardWriter(tmp_path, MANIFEST, SHARD_BYTES)
    with index_path(tmp_path).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_states_may_be_of_any_memory_layout(tmp_path: Path) -> None:
    """Slices and transposed tensors, as engines return them."""
    sample = SAMPLES[0]
    states = random_states(CODEC, sample)
    wide = torch.cat([states.taps, states.taps, states.last], dim=-1)
    turned = wide.t().contiguous().t()
    for number, each in enumerate((wide, turned)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ShardWriter(folder, MANIFEST, 1 << 20) as made:
            made.append(sample, HiddenStates(each[:, 32:64], each[:, 64:]))
        check(folder, [sample])


def test_names_of_any_kind(tmp_path: Path) -> None:
    names = ["a" * 300, "ünïcödé#0", "line\nbreak", "../../etc", " "]
    samples = [replace(SAMPLES[0], id=name) for name in names]
    append_all(tmp_path, samples)
    reader = ShardReader(tmp_path)
    assert [reader.name(record) for record in reader.index] == names
    assert not list(itertools.chain.from_iterable(map(reader.faults, reader.index)))
