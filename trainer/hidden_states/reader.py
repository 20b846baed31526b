"""Reads samples from a folder of hidden states; see `shards` for what lies there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import HEAD, Codec, mask_bytes, token_bytes
from trainer.hidden_states.index import Index, Record
from trainer.hidden_states.mapped import ID, MASK, TOKENS, Shard, Stored
from trainer.hidden_states.shards import again, shard_path
from trainer.records import HiddenStates, Sample

Verify = Literal["first", "always", "never"]
MAPPED = 256  # shards that are mapped at once: each takes a file descriptor


class ShardReader:
    """Random access by sample. `layers` are those to give, ascending (None: all that are stored); the others
    are not read. `verify` says when checksums and rows are checked: at the `first` reading of a sample by
    this reader, `always`, or `never`; lengths, tokens and mask are checked at every reading. Threads share
    one reader; `bytes_read` counts the bytes of the sections that were read."""

    def __init__(self, folder: Path, layers: Sequence[int] | None = None, verify: Verify = "first") -> None:
        if verify not in get_args(Verify):
            raise UserError(f"verify={verify} of stored hidden states is not known; expected one of "
                            f"{', '.join(get_args(Verify))}")
        self.folder, self.verify = folder, verify
        self.manifest = Manifest.read(folder)
        self.manifest.require(folder, layers=layers or ())
        self.codec, self.stored = Codec.of(self.manifest, layers), Codec.of(self.manifest)
        names = self.stored.sections
        self._rows = [names.index(name) for name in self.codec.sections[len(HEAD):]]
        self.index = Index(folder, len(names))
        self.bytes_read = 0
        self._seen: set[bytes] = set()
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()

    def get(self, sample: Sample) -> HiddenStates:
        """The states of a sample; raises when they are not there, not whole, or of other tokens."""
        record = self._find(sample)
        first = record.key not in self._seen
        due = self.verify == "always" or (self.verify == "first" and first)
        wanted = [TOKENS, MASK, *self._rows]
        stored = self._fetched(record, wanted, cold=first)
        self._compare(stored, sample)
        codec, tokens = self.codec, record.tokens
        taps = torch.empty(tokens, len(codec.layers), codec.hidden, dtype=codec.dtype)
        last = torch.zeros(tokens, codec.hidden, dtype=codec.dtype)
        for place, number in enumerate(self._rows):
            if due:
                stored.require_sound(number, sample.id)
            if place < len(codec.layers):
                codec.decode(stored.section(number), taps[:, place])
            else:
                _scatter(codec, stored.section(number), codec.kept(sample.loss_mask), last)
        read = sum(end - start for start, end in map(stored.places.__getitem__, wanted))
        with self._lock:
            self._seen.add(record.key)
            self.bytes_read += read
        return HiddenStates(taps.flatten(1), last)

    def has(self, sample_id: str) -> bool:
        """Whether a sample of this id is stored, by now."""
        if self.index.find(sample_id) is None:
            with self._lock:
                self.index.refresh()
        return self.index.find(sample_id) is not None

    def holds(self, sample: Sample) -> bool:
        """Whether exactly this sample is stored: its tokens and its mask."""
        record = self.index.find(sample.id)
        if record is None or record.tokens != len(sample.tokens):
            return False
        stored = self._fetched(record, [TOKENS, MASK], cold=False)
        return bool((stored.section(TOKENS).numpy() == token_bytes(sample.tokens)).all()
                    and (stored.section(MASK).numpy() == mask_bytes(sample.loss_mask)).all())

    def close(self) -> None:
        self._shards.clear()

    def faults(self, record: Record) -> Iterator[str]:
        """Everything that is wrong with a stored sample, each as a sentence that names it."""
        try:
            stored = self._fetched(record, range(len(self.stored.sections)), cold=True)
        except UserError as error:
            yield str(error)
            return
        found = [stored.fault(number) for number in range(len(self.stored.sections))]
        for fault in [*filter(None, found), *stored.contradictions()]:
            yield f"{stored.shard.path}, sample {stored.name()}: {fault}"

    def name(self, record: Record) -> str:
        """The id of a stored sample."""
        return self._fetched(record, [ID], cold=False).name()

    def _find(self, sample: Sample) -> Record:
        record = self.index.find(sample.id) if self.has(sample.id) else None
        if record is None:
            torn = f" and a torn one ({self.index.tail})" if self.index.tail else ""
            raise UserError(f"{self.folder} has no hidden states of sample {sample.id}: expected its "
                            f"record in {self.index.path}, found {len(self.index)} of other samples{torn}; "
                            f"{again(self.folder)}")
        return record

    def _fetched(self, record: Record, sections: Sequence[int], cold: bool) -> Stored:
        shard = self._shards.get(record.shard)
        if shard is None or len(shard.bytes) < record.end:
            with self._lock:
                shard = self._shards[record.shard] = Shard(shard_path(self.folder, record.shard), record.end)
                if len(self._shards) > MAPPED:  # whoever still copies from the oldest one keeps it alive
                    self._shards.pop(next(iter(self._shards)))
        stored = Stored(shard, record, self.stored)
        stored.fetch(sections, cold)
        return stored

    def _compare(self, stored: Stored, sample: Sample) -> None:
        """Raises unless the stored tokens and mask are those of the sample; says which of the two is at
        fault."""
        same = stored.record.tokens == len(sample.tokens)
        for number, word, own in ((TOKENS, "tokens", token_bytes(sample.tokens)),
                                  (MASK, "mask", mask_bytes(sample.loss_mask))):
            if same and (stored.section(number).numpy() == own).all():
                continue
            stored.require_sound(number, sample.id)
            pair = (sample.tokens, stored.tokens().tolist()) if word == "tokens" else \
                (sample.loss_mask, stored.mask().tolist())
            expected, found = _difference(*pair)
            raise UserError(f"{stored.shard.path} holds other {word} than sample {sample.id}: expected "
                            f"{expected}, found {found}; {again(self.folder)}")


def _scatter(codec: Codec, raw: Tensor, kept: Tensor, last: Tensor) -> None:
    """Puts the stored rows of the last state into the kept rows of `last`; by one copy where those lie side
    by side, as in an answer of one turn."""
    rows = kept.nonzero().flatten()
    if not len(rows):
        return
    start, end = int(rows[0]), int(rows[-1]) + 1
    if end - start == len(rows):
        codec.decode(raw, last[start:end])
    else:
        packed = torch.empty(len(rows), codec.hidden, dtype=codec.dtype)
        codec.decode(raw, packed)
        last.index_copy_(0, rows, packed)


def _difference(expected: Sequence[object], found: Sequence[object]) -> tuple[str, str]:
    """In what two sequences differ, in words."""
    if len(expected) != len(found):
        return f"{len(expected)} tokens", f"{len(found)}"
    place = next(place for place, one in enumerate(expected) if one != found[place])
    return f"{expected[place]} at position {place}", f"{found[place]}"
