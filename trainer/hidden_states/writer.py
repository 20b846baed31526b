"""Appends samples to a folder of hidden states; see `shards` for what lies there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from xxhash import xxh3_64_intdigest

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest, sync_folder, writing
from trainer.hidden_states.codec import Codec, bad_rows
from trainer.hidden_states.index import Index, Record, index_path, key_of
from trainer.hidden_states.shards import again, shard_numbers, shard_path
from trainer.records import HiddenStates, Sample


class FolderBusy(UserError):
    """Another process is writing into the folder."""


class ShardWriter:
    """The only writer of its folder. A sample is stored once `commit` has returned; what was appended
    since the last `commit` is lost with the process, and nothing else. Leaving the `with` commits, unless
    because the disk refused."""

    def __init__(self, folder: Path, manifest: Manifest, shard_bytes: int) -> None:
        """Writes the manifest, or makes sure that the one there is the same; removes what was not committed.
        A shard grows up to `shard_bytes`; a longer sample gets one of its own."""
        manifest.write(folder)
        self.folder, self.codec, self.shard_bytes = folder, Codec.of(manifest), shard_bytes
        self.alignment = manifest.alignment
        self._pending: dict[bytes, Record] = {}
        self._shard = -1  # file of the shard that grows; opened when there is something to write
        self._index_file = _opened(index_path(folder))
        try:
            self._lock()
            self.index = Index(folder, len(self.codec.sections))
            self._repair()
        except BaseException:
            os.close(self._index_file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if kind is None or not issubclass(kind, OSError):
                self.commit()
        finally:
            self.close()

    def close(self) -> None:
        """Gives up the lock. What was not committed is lost."""
        self._close_shard()
        if self._index_file >= 0:
            os.close(self._index_file)
            self._index_file = -1

    def _close_shard(self) -> None:
        if self._shard >= 0:
            os.close(self._shard)
            self._shard = -1

    def has(self, sample_id: str) -> bool:
        """Whether the sample is stored."""
        return self.index.find(sample_id) is not None

    def pending(self, sample_id: str) -> bool:
        """Whether the sample was appended and waits for a `commit`."""
        return key_of(sample_id) in self._pending

    def size(self, sample: Sample) -> int:
        """Bytes that the sample takes on the disk, up to the next page."""
        kept = int(self.codec.kept(sample.loss_mask).sum())
        return self.codec.stored_bytes(len(sample.id.encode()), len(sample.tokens), kept, self.alignment)

    def append(self, sample: Sample, states: HiddenStates) -> None:
        """Writes a sample behind the others; it is not stored before `commit`. Refuses states that are not
        those of the sample's tokens and the manifest's layers, and rows that hold nothing."""
        self._check(sample, states)
        sections = self.codec.encode(sample, states)
        last = len(sections[-1]) // self.codec.row_bytes
        places = self.codec.places(len(sections[0]), len(sample.tokens), last)
        offset, length = self._room(places[-1][1]), places[-1][1]
        for (start, _), section in zip(places, sections, strict=True):
            write_all(self._shard, section.data, offset + start)
        self._end = offset + length
        key = key_of(sample.id)
        self._pending[key] = Record(key, self._number, len(sections[0]), len(sample.tokens), last, offset,
                                    length, tuple(map(xxh3_64_intdigest, sections)))

    def commit(self) -> None:
        """Brings everything appended so far to the disk, and then says so in the index."""
        if not self._pending:
            return
        os.fsync(self._shard)
        packed = b"".join(map(self.index.pack, self._pending.values()))
        write_all(self._index_file, memoryview(packed), self.index.committed)
        os.fsync(self._index_file)
        self.index.add(packed)
        self._pending.clear()

    def _check(self, sample: Sample, states: HiddenStates) -> None:
        known = self.has(sample.id) or self.pending(sample.id)
        assert sample.id and not known, f"{sample.id!r} cannot be added"
        self.codec.check(sample, states)
        if bad := bad_rows(states, torch.ones(len(sample.tokens), dtype=torch.bool)):
            raise UserError(f"{bad} rows of hidden states are all zero or not finite (sample {sample.id}); "
                            "expected none: the engine does not compute what it returns, try its "
                            "dtype=float32")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._index_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusy(f"{self.folder} is being written by another process, which holds the lock of "
                            f"{index_path(self.folder).name}; expected no other writer: wait until it is "
                            "done or stop it, then run the same command") from None

    def _repair(self) -> None:
        """Cuts what a stopped writer left: a torn record, and bytes that no record names, which can only lie
        in the last shard or in the one after it. Nothing is cut from a folder that is damaged."""
        ends = _ends(self.index)
        self._number = max(ends, default=0)
        self._end = ends.get(self._number, 0)
        grown = {self._number, self._number + 1} if ends else {0}
        sizes = {number: _size(shard_path(self.folder, number))
                 for number in {*ends, *shard_numbers(self.folder)}}
        for number, found in sizes.items():
            if found < (end := ends.get(number, 0)) or (found > end and number not in grown):
                raise UserError(f"{shard_path(self.folder, number)} does not fit {self.index.path.name}: "
                                f"expected {end} bytes, found {found}; {again(self.folder)}")
        with writing(self.folder):
            for number, found in sizes.items():
                if number not in ends:
                    shard_path(self.folder, number).unlink()
                elif found > ends[number]:
                    os.truncate(shard_path(self.folder, number), ends[number])
            os.ftruncate(self._index_file, self.index.committed)

    def _room(self, length: int) -> int:
        """Where a sample of `length` bytes goes in the open shard; commits and begins a new one when it is
        full."""
        offset = self._aligned(self._end)
        if self._end and offset + length > self.shard_bytes:
            self.commit()
            self._close_shard()
            self._number, self._end, offset = self._number + 1, 0, 0
        if self._shard < 0:
            self._shard = _opened(shard_path(self.folder, self._number))
            sync_folder(self.folder)
        return offset

    def _aligned(self, position: int) -> int:
        return -(-position // self.alignment) * self.alignment


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Writes all bytes at `offset`; the system may take them in parts."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _opened(path: Path) -> int:
    with writing(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ends(records: Iterable[Record]) -> dict[int, int]:
    """The last committed byte of every shard."""
    ends: dict[int, int] = {}
    for record in records:
        ends[record.shard] = max(ends.get(record.shard, 0), record.end)
    return ends
