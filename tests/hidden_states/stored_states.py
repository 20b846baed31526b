"""What the tests of stored hidden states share: the stages of conf/hidden_states on the tiny target, a cache
that one of them made, and ways to spoil it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.utils import get_class
from tiny import engine, random_samples, write_responses
from xxhash import xxh3_64_intdigest

from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.extract import Probe
from trainer.hidden_states.index import Index, index_path
from trainer.hidden_states.shards import shard_path
from trainer.records import HiddenStates, Sample
from trainer.target import Target

CONF = Path(__file__).parents[2] / "conf/hidden_states"
SAMPLES = random_samples((40, 23, 57, 31, 12))
LAYERS = [1, 2, 3]  # of the caches in conftest.py
WIDTH = {"native": 64 * 4, "float8_e4m3fn": 64 + 2}  # bytes of one of their rows
STORAGES = sorted(WIDTH)
SMALL_SHARD = 40_000 / (1 << 30)  # GiB; the samples above need several of these


def make(name: str, target: Target, tap_layers: list[int], **changes: Any) -> Probe:
    """The stage of conf/hidden_states/NAME.yaml on the tiny target; changes of `runtime` are added to it."""
    known = {"${target}": target, "${target_engine}": engine(), "${target.tap_layers}": tap_layers,
             "${target_engine.dtype}": "float32", "${hardware.device}": "cpu",
             "${target.max_length}": target.max_length, "${target.trust_remote_code}": False,
             "${hidden_states.engine}": engine()}

    def build(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("${"):
            return known[value]
        if isinstance(value, dict):
            value = {key: build(inner) for key, inner in value.items()}
            if "_target_" in value:
                kind, waits = get_class(value.pop("_target_")), value.pop("_partial_", False)
                return partial(kind, **value) if waits else kind(**value)
        return value

    node = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return build(node | changes | {"runtime": node["runtime"] | changes.get("runtime", {})})


def extract(stage: Probe, folder: Path, samples: list[Sample] = SAMPLES) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return stage.run({"responses": write_responses(folder.parent / "responses", samples, heldout=2)}, folder)


def random_states(codec: Codec, sample: Sample) -> HiddenStates:
    """States that are a function of the sample's id."""
    generator = torch.Generator().manual_seed(sum(sample.id.encode()) + 1000 * len(sample.tokens))
    rows = len(sample.tokens)
    taps, last = (torch.randn(rows, width * codec.hidden, generator=generator).to(codec.dtype)
                  for width in (len(codec.layers), 1))
    return HiddenStates(taps, last)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def equal(one: HiddenStates, two: HiddenStates) -> bool:
    return torch.equal(one.taps, two.taps) and torch.equal(one.last, two.last) \
        and one.taps.dtype == two.taps.dtype and one.last.dtype == two.last.dtype


def index_of(folder: Path) -> Index:
    return Index(folder, len(Codec.of(Manifest.read(folder)).sections))


def change(folder: Path, sample_id: str, section: str, edit: Callable[[bytearray], Any],
           sealed: bool = False, same: bool = False) -> Path:
    """Edits the bytes of one section of a stored sample, which may stay the `same` where that is said;
    `sealed` also makes the checksums fit, as a faulty writer would have. Returns the shard."""
    codec, index = Codec.of(Manifest.read(folder)), index_of(folder)
    record, number = index.find(sample_id), codec.sections.index(section)
    assert record is not None
    start, end = codec.places(record.id_bytes, record.tokens, record.last)[number]
    path = shard_path(folder, record.shard)
    content = bytearray(path.read_bytes())
    part = content[record.offset + start:record.offset + end]
    before = bytes(part)
    edit(part)
    assert len(part) == end - start and (same or part != before)
    content[record.offset + start:record.offset + end] = part
    path.write_bytes(content)
    if sealed:
        sums = list(record.checksums)
        sums[number] = xxh3_64_intdigest(bytes(part))
        records = [each._replace(checksums=tuple(sums)) if each.key == record.key else each for each in index]
        index_path(folder).write_bytes(b"".join(map(index.pack, records)))
    return path


def flip(place: int = 0) -> Callable[[bytearray], None]:
    """Flips one bit of the byte at `place`, counted from the end when negative."""
    def edit(part: bytearray) -> None:
        part[place] ^= 1
    return edit


def fill(start: int, end: int, values: bytes) -> Callable[[bytearray], None]:
    """Repeats `values` from one byte to another."""
    def edit(part: bytearray) -> None:
        part[start:end] = values * ((end - start) // len(values))
    return edit
