"""A shard in memory, and one stored sample inside it.

A shard is mapped, so that bytes go from the page cache to where they are wanted in one copy. Touching a
mapped page that cannot be read would end the process; `Shard.fetch` asks for the pages before, and gets an
error.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from trainer.errors import UserError
from trainer.hidden_states.codec import HEAD, Codec
from trainer.hidden_states.index import Record, key_of
from trainer.hidden_states.shards import again

POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; what does not know it says EINVAL
ID, TOKENS, MASK = range(len(HEAD))
Run = tuple[int, int]  # sections that follow each other, the first and the last


class Shard:
    """A file mapped for reading: as memory, and as a tensor [size] uint8 over it that must not be written."""

    def __init__(self, path: Path, least: int) -> None:
        """`least` is how many bytes the file must have."""
        self.path = path
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path} is missing or cannot be read ({error.strerror}): expected a shard of "
                            f"at least {least} bytes, found none; {again(path.parent)}") from error
        try:
            self._require(os.fstat(file).st_size, least)
            self.memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)
        self.view = memoryview(self.memory)
        with warnings.catch_warnings():  # torch cannot know that nobody writes into this tensor
            warnings.simplefilter("ignore", UserWarning)
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    def fetch(self, start: int, end: int, cold: bool) -> None:
        """Makes the bytes from `start` to `end` safe to touch; where they are probably `cold`, the disk is
        asked for all of them at once."""
        self._require(self.memory.size(), end)
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            if cold:
                self.memory.madvise(mmap.MADV_WILLNEED, begin, end - begin)
            self.memory.madvise(POPULATE_READ, begin, end - begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise UserError(f"{self.path} cannot be read ({error.strerror}): expected bytes {start} to "
                                f"{end}, found none; check the disk, or {again(self.path.parent)}") from error

    def _require(self, size: int, least: int) -> None:
        if size < least:
            raise UserError(f"{self.path} is truncated: expected at least {least} bytes, found {size}; "
                            f"{again(self.path.parent)}")


class Stored:
    """One sample inside a mapped shard."""

    def __init__(self, shard: Shard, record: Record, codec: Codec,
                 places: list[tuple[int, int]] | None = None) -> None:
        """`codec` has all the layers that are stored; `places` are those of an earlier reading."""
        self.shard, self.record, self.codec = shard, record, codec
        self.places = places or codec.places(record.id_bytes, record.tokens, record.last)
        if record.length != self.places[-1][1]:
            raise UserError(f"{shard.path}: the record of a sample with {record.tokens} tokens names "
                            f"{record.length} bytes, expected {self.places[-1][1]}; "
                            f"{again(shard.path.parent)}")

    def fetch(self, runs: Sequence[Run], cold: bool) -> None:
        """Makes sections safe to touch, those that follow each other in one call."""
        for first, last in runs:
            start, end = self.places[first][0], self.places[last][1]
            if end > start:
                self.shard.fetch(self.record.offset + start, self.record.offset + end, cold)

    def section(self, number: int) -> memoryview:
        """The bytes of a section, in the mapped memory."""
        start, end = self.places[number]
        return self.shard.view[self.record.offset + start:self.record.offset + end]

    def span(self, first: int, last: int) -> Tensor:
        """The bytes from the start of one section to the end of another, [size] uint8, likewise."""
        start, end = self.places[first][0], self.places[last][1]
        return self.shard.tensor[self.record.offset + start:self.record.offset + end]

    def require_sound(self, numbers: Iterable[int], sample_id: str) -> None:
        """Raises for the first section whose checksum or rows are wrong."""
        for number in numbers:
            if fault := self.fault(number):
                raise UserError(f"{self.shard.path}, sample {sample_id}: {fault}; "
                                f"{again(self.shard.path.parent)}")

    def fault(self, number: int) -> str:
        """What is wrong with a section: its checksum or its rows; "" when nothing is."""
        name, expected = self.codec.sections[number], self.record.checksums[number]
        if (found := xxh3_64_intdigest(self.section(number))) != expected:
            return f"section '{name}' is damaged: expected checksum {expected:016x}, found {found:016x}"
        rows = self.record.last if name == "last" else self.record.tokens
        if number >= len(HEAD) and (bad := self.codec.unsound(self.span(number, number), rows)):
            return (f"section '{name}' holds rows that are all zero or not finite: expected none, found "
                    f"{bad} of {rows}")
        return ""

    def name(self) -> str:
        """The sample's id as it is stored, or its key where that is damaged."""
        if self.fault(ID):
            return f"of key {self.record.key.hex()}"
        return bytes(self.section(ID)).decode(errors="replace")

    def contradictions(self) -> Iterator[str]:
        """In what the sound sections of a sample contradict its record."""
        if not self.fault(ID) and (found := key_of(self.name())) != self.record.key:
            yield f"the stored id does not fit: expected key {self.record.key.hex()}, found {found.hex()}"
        if not self.fault(TOKENS) and (below := int((self.tokens() < 0).sum())):
            yield f"{below} token ids are negative: expected 0, found {below}"
        kept = int(self.codec.kept(self.mask().tolist()).sum())
        if not self.fault(MASK) and kept != self.record.last:
            yield f"section 'last' does not fit the mask: expected {kept} rows, found {self.record.last}"

    def tokens(self) -> np.ndarray:
        return np.frombuffer(self.section(TOKENS), dtype="<i4")

    def mask(self) -> np.ndarray:
        packed = np.frombuffer(self.section(MASK), dtype=np.uint8)
        return np.unpackbits(packed, count=self.record.tokens, bitorder="little").astype(bool)


def runs_of(numbers: Iterable[int]) -> list[Run]:
    """Ascending numbers of sections, as runs."""
    runs: list[Run] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
