"""`index.bin`: one record of fixed width for each stored sample. A record is the commit of its sample: it is
appended after everything that it names has reached the disk.

Little-endian: key (16 bytes, a hash of the sample's id), shard, bytes of the id, tokens, stored rows of
`last` (u32 each), offset and length of the sample in its shard (u64 each), one xxh3_64 for each section
(u64), and one of the record itself. What follows the last sound record was not committed: a writer was
stopped there, or is at work. Reading never changes the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from trainer.errors import UserError
from trainer.hidden_states.shards import again

KEY_BYTES = 16
CHECKSUM_BYTES = 8


class Record(NamedTuple):
    """Where one sample lies and what its sections must hash to; `offset` and `length` in bytes."""

    key: bytes
    shard: int
    id_bytes: int
    tokens: int
    last: int
    offset: int
    length: int
    checksums: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.length


class Index:
    """The committed records of a folder, as of the last `refresh`."""

    def __init__(self, folder: Path, sections: int) -> None:
        self.path = index_path(folder)
        self._form = struct.Struct(f"<{KEY_BYTES}s4I2Q{sections}Q")
        self.width = self._form.size + CHECKSUM_BYTES
        self._records = bytearray()
        self._places: dict[bytes, int] = {}
        self.tail = ""  # what follows the last record, in words; "" when nothing does
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Record]:
        """In the order in which they were committed."""
        return map(self._unpack, list(self._places.values()))

    def find(self, sample_id: str) -> Record | None:
        place = self._places.get(key_of(sample_id))
        return None if place is None else self._unpack(place)

    @property
    def committed(self) -> int:
        """Length of the committed part of the file, in bytes."""
        return len(self._records)

    def refresh(self) -> bool:
        """Reads what was appended since; says whether there are new records. Raises for a damaged one."""
        found = self._read_from(len(self._records))
        count = 0
        while (count + 1) * self.width <= len(found) and not self._fault(found, count):
            count += 1
        rest = found[count * self.width:]
        for later in range(1, len(rest) // self.width):
            if not self._fault(rest, later):  # a record that is no tail
                raise UserError(f"{self.path}: record {len(self) + count} is damaged: "
                                f"{self._fault(rest, 0)}; {again(self.path.parent)}")
        self.tail = "" if not rest else self._fault(rest, 0) if len(rest) >= self.width else \
            f"expected a record of {self.width} bytes, found {len(rest)} bytes of one"
        self.add(found[:count * self.width])
        return count > 0

    def add(self, packed: bytes) -> None:
        """Takes in records that were read, or that their writer has just committed."""
        known = len(self._records)
        self._records += packed  # first, as other threads find records by their place
        for start in range(0, len(packed), self.width):
            self._places[packed[start:start + KEY_BYTES]] = known + start

    def pack(self, record: Record) -> bytes:
        body = self._form.pack(record.key, record.shard, record.id_bytes, record.tokens, record.last,
                               record.offset, record.length, *record.checksums)
        return body + xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")

    def _unpack(self, place: int) -> Record:
        fields = self._form.unpack_from(self._records, place)
        return Record(*fields[:7], fields[7:])

    def _read_from(self, start: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}); expected the index of the "
                            "hidden states stored beside it") from error

    def _fault(self, packed: bytes, number: int) -> str:
        """What is wrong with a record; "" when nothing is."""
        record = packed[number * self.width:(number + 1) * self.width]
        stored, found = int.from_bytes(record[-CHECKSUM_BYTES:], "little"), _checksum(record)
        return "" if found == stored else f"expected a record of checksum {stored:016x}, found {found:016x}"


def index_path(folder: Path) -> Path:
    return folder / "index.bin"


def key_of(sample_id: str) -> bytes:
    return xxh3_128_digest(sample_id.encode())


def _checksum(record: bytes) -> int:
    return xxh3_64_intdigest(record[:-CHECKSUM_BYTES])
