"""No damage goes unseen: every kind of it, on a cache that the engine made, and what the message says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_states import SAMPLES, WIDTH, change, contents, fill, flip, index_of

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import token_bytes
from trainer.hidden_states.index import index_path
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import shard_numbers, shard_path
from trainer.records import Sample
from trainer.target import Target

REMEDY = "remove {} and run the stage hidden_states again$"


def refused(folder: Path, sample: Sample, said: str, verify: Any = "first") -> None:
    """Reading the sample says so, in one sentence with the remedy; the other samples can still be read."""
    reader = ShardReader(folder, verify=verify)
    with pytest.raises(UserError, match=said + ".*" + REMEDY.format(re.escape(str(folder)))) as caught:
        reader.get(sample)
    assert "\n" not in str(caught.value)
    for other in SAMPLES:
        if other.id != sample.id:
            reader.get(other)


def test_the_cache_has_shards_of_several_samples(made: dict[str, Path]) -> None:
    """What the tests below stand on."""
    shards = [record.shard for record in index_of(made["native"])]
    assert len(shards) == 5 and len(set(shards)) >= 3 and shards == sorted(shards)
    assert shard_numbers(made["native"]) == sorted(set(shards))
    for record in index_of(made["native"]):
        assert record.offset % 4096 == 0
    assert 2 * sum(map(len, contents(made["float8_e4m3fn"]).values())) < \
        sum(map(len, contents(made["native"]).values())), "float32 has four times the bytes"


# damage


def test_a_truncated_shard(either: Path) -> None:
    record = index_of(either).find("s2")
    path = shard_path(either, record.shard)
    content = path.read_bytes()
    path.write_bytes(content[:record.end - 10])
    refused(either, SAMPLES[2], f"^{path} is truncated: expected at least {record.end} bytes, found "
                                f"{record.end - 10};")


def test_a_shard_that_is_truncated_while_it_is_read(cache: Path) -> None:
    """The reader has it in memory already, and must not die of touching what is gone."""
    reader = ShardReader(cache, verify="never")
    reader.get(SAMPLES[2])
    record = index_of(cache).find("s2")
    with shard_path(cache, record.shard).open("r+b") as file:
        file.truncate(record.offset + 100)
    with pytest.raises(UserError, match=f"is truncated: expected at least .*, found {record.offset + 100}"):
        reader.get(SAMPLES[2])


def test_a_shard_that_is_gone(cache: Path) -> None:
    record = index_of(cache).find("s2")
    path = shard_path(cache, record.shard)
    path.unlink()
    refused(cache, SAMPLES[2], rf"^{path} is missing or cannot be read \(No such file or directory\): "
                               "expected a shard of at least")


def test_a_truncated_index(cache: Path) -> None:
    path = index_path(cache)
    path.write_bytes(path.read_bytes()[:4 * index_of(cache).width])
    refused(cache, SAMPLES[4], f"^{cache} has no hidden states of sample s4: expected its record in {path}, "
                               "found 4 of other samples;")


def test_a_torn_record(cache: Path) -> None:
    path, width = index_path(cache), index_of(cache).width
    path.write_bytes(path.read_bytes()[:-20])
    refused(cache, SAMPLES[4], f"sample s4: expected its record in {path}, found 4 of other samples and a "
                               rf"torn one \(expected a record of {width} bytes, found {width - 20} bytes of "
                               r"one\);")


@pytest.mark.parametrize("number", range(5))
def test_a_record_with_a_flipped_bit(cache: Path, number: int) -> None:
    """In the middle it is damage; the last one cannot be told from one that was being written."""
    path, width = index_path(cache), index_of(cache).width
    content = bytearray(path.read_bytes())
    content[number * width + 30] ^= 4
    path.write_bytes(content)
    checksums = "expected a record of checksum [0-9a-f]{16}, found [0-9a-f]{16}"
    if number == 4:
        refused(cache, SAMPLES[4], rf"found 4 of other samples and a torn one \({checksums}\);")
    else:
        with pytest.raises(UserError, match=f"^{path}: record {number} is damaged: {checksums}; "
                                            + REMEDY.format(cache)):
            ShardReader(cache)


@pytest.mark.parametrize("section", ["tokens", "mask", "layer 1", "layer 2", "layer 3", "last"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_in_a_section(either: Path, section: str, place: int) -> None:
    path = change(either, "s2", section, flip(place))
    refused(either, SAMPLES[2], f"^{path}, sample s2: section '{section}' is damaged: expected checksum "
                                "[0-9a-f]{16}, found [0-9a-f]{16};")


ROWS = {"a row of no numbers": b"\xff", "a row of zeros": b"\0"}


@pytest.mark.parametrize("section", ["layer 1", "layer 3", "last"])
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_holds_nothing(either: Path, section: str, kind: str) -> None:
    """Written so, with checksums that fit: row 3 of the section."""
    storage = Manifest.read(either).storage
    rows = 57 if section != "last" else 49
    if storage == "native":
        start = 3 * WIDTH[storage]
        edit = fill(start, start + WIDTH[storage], ROWS[kind])
    elif kind == "a row of zeros":
        edit = fill(2 * rows + 3 * 64, 2 * rows + 4 * 64, b"\0")
    else:
        edit = fill(6, 8, b"\xff")  # the scale of row 3
    path = change(either, "s2", section, edit, sealed=True)
    refused(either, SAMPLES[2], f"^{path}, sample s2: section '{section}' holds rows that are all zero or "
                                f"not finite: expected none, found 1 of {rows};")


def test_states_of_other_tokens(either: Path) -> None:
    record = index_of(either).find("s1")
    path = shard_path(either, record.shard)
    tokens = list(SAMPLES[1].tokens)
    for place, token in ((0, 255 - tokens[0]), (22, 300)):
        changed = replace(SAMPLES[1], tokens=(*tokens[:place], token, *tokens[place + 1:]))
        refused(either, changed, f"^{path} holds other tokens than sample s1: expected {token} at position "
                                 f"{place}, found {tokens[place]};", verify="never")
    longer = replace(SAMPLES[1], tokens=(*tokens, 5), loss_mask=(*SAMPLES[1].loss_mask, True))
    refused(either, longer, f"^{path} holds other tokens than sample s1: expected 24 tokens, found 23;")


def test_states_of_another_mask(cache: Path) -> None:
    """With the same tokens: other rows of the last state were kept."""
    changed = replace(SAMPLES[1], loss_mask=(True,) * 23)
    refused(cache, changed, "holds other mask than sample s1: expected True at position 0, found False;")


def test_tokens_that_a_faulty_writer_stored(cache: Path) -> None:
    tokens = (*SAMPLES[1].tokens[:-1], 319)
    change(cache, "s1", "tokens", fill(0, 92, token_bytes(tokens)), sealed=True)
    refused(cache, SAMPLES[1], f"holds other tokens than sample s1: expected {SAMPLES[1].tokens[-1]} at "
                               "position 22, found 319;")


def test_a_record_whose_length_does_not_fit(cache: Path) -> None:
    index = index_of(cache)
    records = [each._replace(tokens=each.tokens + 9) if number == 2 else each
               for number, each in enumerate(index)]
    index_path(cache).write_bytes(b"".join(map(index.pack, records)))
    refused(cache, SAMPLES[2], r"the record of a sample with 66 tokens names \d+ bytes, expected \d+;")


def test_rows_of_the_last_state_that_a_faulty_writer_left_out(cache: Path) -> None:
    """Stored with the mask of the sample, but for another choice of rows."""
    index = index_of(cache)
    record = index.find("s2")
    shorter = record._replace(last=40, length=record.length - 9 * WIDTH["native"])
    index_path(cache).write_bytes(b"".join(index.pack(shorter if each.key == record.key else each)
                                           for each in index))
    refused(cache, SAMPLES[2], "sample s2: section 'last' does not fit the mask: expected 49 rows, found 40;",
            verify="never")


def test_wrong_layers_target_and_template(cache: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"reads layers \[0, 2, 3\] but the hidden states hold layers \[1, 2, "
                                        rf"3\] \({cache}/manifest.json\), so \[0\] are missing"):
        ShardReader(cache, [0, 2, 3])
    manifest = Manifest.read(cache)
    manifest.require(cache, target=tiny_target.identity, template=tiny_target.template_hash)
    other = replace(tiny_target, template={"enable_thinking": True})
    with pytest.raises(UserError, match=f"^{cache}/manifest.json holds hidden states of another chat "
                                        f"template: expected {other.template_hash}, found "
                                        f"{tiny_target.template_hash}; "
                                        + REMEDY.format(cache)):
        manifest.require(cache, template=other.template_hash)
    with pytest.raises(UserError, match=f"another target: expected 0123, found {tiny_target.identity}; "):
        manifest.require(cache, target="0123")


def test_an_unknown_way_to_verify(cache: Path) -> None:
    with pytest.raises(UserError, match="verify=sometimes .*; expected one of first, always, never"):
        ShardReader(cache, verify="sometimes")  # type: ignore[arg-type]
