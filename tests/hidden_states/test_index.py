"""The index: records come back, a torn end is no record, a damaged middle is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.hidden_states.index import Index, Record, index_path, key_of

SECTIONS = 5
NAMES = [f"sample-{number}" for number in range(4)]


def record(number: int) -> Record:
    return Record(key_of(NAMES[number]), number // 2, 8, 30 + number, number, 4096 * number, 900 + number,
                  tuple(1000 * number + place for place in range(SECTIONS)))


def written(folder: Path, count: int = 4) -> bytes:
    index = Index(folder, SECTIONS)
    packed = b"".join(index.pack(record(number)) for number in range(count))
    index_path(folder).write_bytes(packed)
    return packed


numbers = st.integers(0, 2 ** 32 - 1)
records = st.builds(Record, st.binary(min_size=16, max_size=16), numbers, numbers, numbers, numbers,
                    st.integers(0, 2 ** 64 - 1), st.integers(0, 2 ** 64 - 1),
                    st.lists(st.integers(0, 2 ** 64 - 1), min_size=SECTIONS, max_size=SECTIONS).map(tuple))


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=6, unique_by=lambda each: each.key))
def test_records_come_back_in_their_order(tmp_path_factory: pytest.TempPathFactory,
                                          expected: list[Record]) -> None:
    folder = tmp_path_factory.mktemp("index")
    index = Index(folder, SECTIONS)
    assert len(index) == 0 and index.tail == "" and not index_path(folder).exists(), "reading makes no file"
    packed = [index.pack(each) for each in expected]
    assert {len(each) for each in packed} <= {index.width}
    index_path(folder).write_bytes(b"".join(packed))
    assert index.refresh() == bool(expected) and list(index) == expected == list(Index(folder, SECTIONS))
    assert not index.refresh() and index.committed == sum(map(len, packed))


def test_records_are_found_by_the_id_of_their_sample(tmp_path: Path) -> None:
    written(tmp_path)
    index = Index(tmp_path, SECTIONS)
    assert [index.find(name) for name in NAMES] == [record(number) for number in range(4)]
    assert index.find("sample-4") is None and index.find("") is None
    assert index.find(NAMES[2]).end == 2 * 4096 + 902


def test_a_file_that_ends_anywhere_has_the_whole_records_before(tmp_path: Path) -> None:
    packed = written(tmp_path)
    width = Index(tmp_path, SECTIONS).width
    for length in range(len(packed) + 1):
        index_path(tmp_path).write_bytes(packed[:length])
        index = Index(tmp_path, SECTIONS)
        assert len(index) == length // width and index.committed == length // width * width
        rest = length % width
        said = f"expected a record of {width} bytes, found {rest} bytes of one"
        assert index.tail == (said if rest else "")
        assert index_path(tmp_path).stat().st_size == length, "reading repairs nothing"
        index_path(tmp_path).write_bytes(packed)  # the writer goes on
        assert index.refresh() == (length < len(packed)) and len(index) == 4 and index.tail == ""


@pytest.mark.parametrize("garbage", [b"\0", b"\xff"])
@pytest.mark.parametrize("count", [0.4, 1, 3.5])
def test_an_end_that_never_reached_the_disk_is_no_record(tmp_path: Path, garbage: bytes,
                                                         count: float) -> None:
    """After a power cut a file may have its length and other bytes."""
    packed = written(tmp_path, 2)
    width = Index(tmp_path, SECTIONS).width
    index_path(tmp_path).write_bytes(packed + garbage * int(count * width))
    index = Index(tmp_path, SECTIONS)
    assert len(index) == 2 and index.committed == 2 * width and "expected a record of" in index.tail


def test_any_flipped_bit_is_seen(tmp_path: Path) -> None:
    packed = written(tmp_path)
    width = Index(tmp_path, SECTIONS).width
    for place in range(len(packed)):
        changed = bytearray(packed)
        changed[place] ^= 1 << place % 8
        index_path(tmp_path).write_bytes(changed)
        if place < 3 * width:
            with pytest.raises(UserError, match=f"^{index_path(tmp_path)}: record {place // width} is "
                                                "damaged: "
                                                "expected a record of checksum [0-9a-f]{16}, found "
                                                "[0-9a-f]{16}; "
                                                f"remove {tmp_path} and run the stage"):
                Index(tmp_path, SECTIONS)
        else:
            index = Index(tmp_path, SECTIONS)
            assert len(index) == 3 and "expected a record of checksum" in index.tail


def test_an_index_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    index_path(tmp_path).mkdir()
    with pytest.raises(UserError, match=f"{index_path(tmp_path)} cannot be read .*; expected the index"):
        Index(tmp_path, SECTIONS)
