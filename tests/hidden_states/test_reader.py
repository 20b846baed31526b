"""What is read and checked when, by whom at once, and the audit of a whole cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_states import LAYERS, SAMPLES, WIDTH, change, equal, fill, flip, index_of, random_states
from tiny import states_of

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec, mask_bytes
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import shard_path
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates, Sample
from trainer.target import Target

# what is checked when


def test_checksums_are_compared_when_asked_for(cache: Path) -> None:
    readers = {verify: ShardReader(cache, verify=verify) for verify in ("first", "always", "never")}
    good = {verify: reader.get(SAMPLES[2]) for verify, reader in readers.items()}
    change(cache, "s2", "layer 2", flip(5))  # writes the file anew: the map is of the same file
    for verify in ("first", "never"):
        assert not equal(readers[verify].get(SAMPLES[2]), good[verify]), "the changed bits are read"
    with pytest.raises(UserError, match="section 'layer 2' is damaged"):
        readers["always"].get(SAMPLES[2])


def test_tokens_are_compared_at_every_reading(cache: Path) -> None:
    for verify in ("first", "never"):
        reader = ShardReader(cache, verify=verify)
        reader.get(SAMPLES[2])
        with pytest.raises(UserError, match="holds other tokens than sample s2"):
            reader.get(replace(SAMPLES[2], tokens=tuple(range(57))))
    change(cache, "s2", "tokens", flip())
    with pytest.raises(UserError, match="section 'tokens' is damaged"):
        ShardReader(cache, verify="never").get(SAMPLES[2])


# what is read


@pytest.mark.parametrize("layers", [[1], [3], [2, 3], [1, 3], [1, 2, 3]])
def test_only_the_wanted_layers_are_read(either: Path, layers: list[int], tiny_target: Target) -> None:
    """Counted, and shown by damage in the other layers that nobody sees."""
    for other in set(LAYERS) - set(layers):
        change(either, "s2", f"layer {other}", flip())
    reader, whole = ShardReader(either, layers, "always"), ShardReader(either, verify="never")
    found = reader.get(SAMPLES[2])
    whole.get(SAMPLES[2])
    width = WIDTH[reader.manifest.storage]
    head, kept = 4 * 57 + 8, 49 * width
    assert reader.bytes_read == head + len(layers) * 57 * width + kept
    assert whole.bytes_read == head + 3 * 57 * width + kept
    expected = Codec.of(reader.manifest, layers).roundtrip(states_of(tiny_target, SAMPLES, layers)[2],
                                                           SAMPLES[2].loss_mask)
    assert equal(found, expected)
    assert reader.get(SAMPLES[2]).taps.shape == (57, 64 * len(layers))
    assert reader.bytes_read == 2 * (head + len(layers) * 57 * width + kept)


def test_a_tensor_is_the_caller_s_own(cache: Path) -> None:
    reader = ShardReader(cache)
    one = reader.get(SAMPLES[0])
    before = HiddenStates(one.taps.clone(), one.last.clone())
    one.taps.zero_()
    one.last.zero_()
    for again in (reader, ShardReader(cache, verify="always")):
        assert equal(again.get(SAMPLES[0]), before)
    reader.close()
    assert equal(reader.get(SAMPLES[0]), before), "a closed reader opens again when asked"


@pytest.mark.parametrize("mask", ["none", "all", "two turns", "first", "last"])
def test_rows_of_the_last_state_go_where_they_were(tmp_path: Path, mask: str) -> None:
    flags = {"none": (False,) * 20, "all": (True,) * 20, "first": (True,) + (False,) * 19,
             "last": (False,) * 19 + (True,),
             "two turns": tuple(4 <= place < 9 or place > 14 for place in range(20))}[mask]
    sample = Sample("one", tuple(range(20)), flags)
    manifest = Manifest("t", "t", [4], 6, "bfloat16", "native", "supervised", "tests")
    states = random_states(Codec.of(manifest), sample)
    with ShardWriter(tmp_path, manifest, 1 << 20) as writer:
        writer.append(sample, states)
    found = ShardReader(tmp_path).get(sample)
    kept = torch.tensor([*flags[1:], False])
    assert torch.equal(found.last[kept], states.last[kept]) and not found.last[~kept].any()
    assert torch.equal(found.taps, states.taps)


def test_a_moved_folder_works(either: Path, tmp_path: Path) -> None:
    before = [ShardReader(either).get(sample) for sample in SAMPLES]
    moved = either.rename(tmp_path / "elsewhere")
    reader = ShardReader(moved, verify="always")
    assert all(equal(reader.get(sample), state) for sample, state in zip(SAMPLES, before, strict=True))
    with ShardWriter(moved, Manifest.read(moved), 1 << 20) as writer:
        assert all(writer.has(sample.id) for sample in SAMPLES)


def test_many_threads_share_a_reader_of_many_shards(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer shards may stay mapped than are asked for in turn."""
    monkeypatch.setattr("trainer.hidden_states.reader.MAPPED", 1)
    reader, expected = ShardReader(cache), [ShardReader(cache).get(sample) for sample in SAMPLES]
    failed: list[int] = []

    def ask(start: int) -> None:
        for turn in range(60):
            number = (start + turn) % 5
            if not equal(reader.get(SAMPLES[number]), expected[number]):
                failed.append(number)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert len(reader._shards) <= 2


# the audit behind tools/show_shards.py


def audit(folder: Path) -> list[str]:
    reader = ShardReader(folder)
    return [fault for record in reader.index for fault in reader.faults(record)]


def test_an_audit_finds_nothing_in_a_good_cache(either: Path) -> None:
    assert audit(either) == []
    reader = ShardReader(either)
    assert [reader.name(record) for record in reader.index] == [sample.id for sample in SAMPLES]


def spoil_id(part: bytearray) -> None:
    part[:] = b"x9"


AUDITED: dict[str, tuple[str, Callable[[bytearray], None], bool, str]] = {
    "a flipped bit": ("layer 1", flip(9), False, "sample s2: section 'layer 1' is damaged: expected "
                                                 "checksum"),
    "an unreadable id": ("id", flip(), False, "sample of key [0-9a-f]{32}: section 'id' is damaged"),
    "another id": ("id", spoil_id, True, "sample x9: the stored id does not fit: expected key [0-9a-f]{32}, "
                                         "found"),
    "negative tokens": ("tokens", fill(8, 12, b"\xff"), True,
                        "sample s2: 1 token ids are negative: expected 0, found 1"),
    "another mask": ("mask", fill(0, 8, mask_bytes([True] * 57)), True,
                     "sample s2: section 'last' does not fit the mask: expected 56 rows, found 49"),
    "a row of zeros": ("last", fill(0, 256, b"\0"), True,
                       "sample s2: section 'last' holds rows that are all zero or not finite: expected none, "
                       "found 1 of 49"),
}


@pytest.mark.parametrize("case", AUDITED)
def test_an_audit_names_each_fault(cache: Path, case: str) -> None:
    section, edit, sealed, said = AUDITED[case]
    path = change(cache, "s2", section, edit, sealed)
    [found] = audit(cache)
    assert re.match(f"{path}, {said}", found), found


def test_an_audit_goes_on_behind_a_missing_shard(cache: Path) -> None:
    path = shard_path(cache, index_of(cache).find("s2").shard)
    path.unlink()
    change(cache, "s4", "mask", flip())
    found = audit(cache)
    lost = [record for record in index_of(cache) if shard_path(cache, record.shard) == path]
    assert len(found) == len(lost) + 1 and "sample s4: section 'mask' is damaged" in found[-1]
    assert all(str(path) in each for each in found[:-1])


def test_bytes_on_the_disk_are_where_the_docstrings_say(cache: Path) -> None:
    """The format itself, read without our reader."""
    record = index_of(cache).find("s0")
    content = shard_path(cache, record.shard).read_bytes()[record.offset:record.end]
    assert content[:2] == b"s0"
    assert np.frombuffer(content[64:64 + 160], "<i4").tolist() == list(SAMPLES[0].tokens)
    start = 256  # id in [0, 2), tokens in [64, 224), mask in [224, 229) -> padded: [256, 261)
    assert np.unpackbits(np.frombuffer(content[start:start + 5], np.uint8), bitorder="little").tolist() == \
        [int(flag) for flag in SAMPLES[0].loss_mask]
    layers = [np.frombuffer(content[320 + each * 40 * 256:][:40 * 256], "<f4") for each in range(3)]
    found = ShardReader(cache).get(SAMPLES[0])
    for layer, rows in zip(layers, found.taps.chunk(3, dim=-1), strict=True):
        assert layer.tolist() == rows.flatten().tolist()
