"""Reads samples from a folder of hidden states; see `shards` for what lies there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import HEAD, Codec, mask_bytes, token_bytes
from trainer.hidden_states.index import Index, Record
from trainer.hidden_states.mapped import ID, MASK, TOKENS, Shard, Stored, runs_of
from trainer.hidden_states.shards import again, shard_path
from trainer.records import HiddenStates, Sample

Verify = Literal["first", "always", "never"]
MAPPED = 256  # shards that are mapped at once: each takes a file descriptor


class _Known(NamedTuple):
    """A sample that was read before. Its tuples cannot change, so the same ones need no second comparison."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    record: Record
    places: list[tuple[int, int]]


class ShardReader:
    """Random access by sample. `layers` are those to give, ascending (None: all that are stored); the others
    are not read. `verify` says when checksums and rows are checked: at the `first` reading of a sample by
    this reader, `always`, or `never`; lengths, tokens and mask are always checked. Threads share one reader;
    `bytes_read` counts the bytes of the sections that were read."""

    def __init__(self, folder: Path, layers: Sequence[int] | None = None, verify: Verify = "first") -> None:
        if verify not in get_args(Verify):
            raise UserError(f"verify={verify} of stored hidden states is not known; expected one of "
                            f"{', '.join(get_args(Verify))}")
        self.folder, self.verify = folder, verify
        self.manifest = Manifest.read(folder)
        self.manifest.require(folder, layers=layers or ())
        self.codec, self.stored = Codec.of(self.manifest, layers), Codec.of(self.manifest)
        names = self.stored.sections
        *layers, last = map(names.index, self.codec.sections[len(HEAD):])
        self._layers, self._last = runs_of(layers), last
        self._numbers = [TOKENS, MASK, *layers, last]
        self._wanted = runs_of(self._numbers)
        self.index = Index(folder, len(names))
        self.bytes_read = 0
        self._known: dict[str, _Known] = {}
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()

    def get(self, sample: Sample) -> HiddenStates:
        """The states of a sample; raises when they are not there, not whole, or of other tokens."""
        known = self._known.get(sample.id)
        if known is None or known.tokens is not sample.tokens or known.mask is not sample.loss_mask \
                or self.verify == "always":
            stored = self._checked(sample, new=known is None)
        else:
            stored = Stored(self._shard(known.record), known.record, self.stored, known.places)
            stored.fetch(self._wanted, cold=False)
        codec, tokens = self.codec, stored.record.tokens
        taps = torch.empty(tokens, len(codec.layers), codec.hidden, dtype=codec.dtype)
        place = 0
        for first, last in self._layers:
            after = place + last + 1 - first
            codec.decode(stored.span(first, last), taps[:, place:after])
            place = after
        states = HiddenStates(taps.flatten(1), self._last_state(stored, sample).flatten(1))
        read = sum(end - start for start, end in map(stored.places.__getitem__, self._numbers))
        with self._lock:
            self.bytes_read += read
        return states

    def _checked(self, sample: Sample, new: bool) -> Stored:
        """The sample where it lies, after every check that is due; `new` when it was not read before."""
        record = self._find(sample)
        stored = Stored(self._shard(record), record, self.stored)
        stored.fetch(self._wanted, cold=new)
        self._compare(stored, sample)
        if self.verify == "always" or (self.verify == "first" and new):
            stored.require_sound(self._numbers, sample.id)
        self._known[sample.id] = _Known(sample.tokens, sample.loss_mask, record, stored.places)
        return stored

    def _last_state(self, stored: Stored, sample: Sample) -> Tensor:
        """The last state [tokens, 1, hidden], zeros where it is not kept. Rows that lie side by side, as in
        an answer of one turn, take one copy."""
        codec, count, raw = self.codec, stored.record.last, stored.span(self._last, self._last)
        out = torch.zeros(stored.record.tokens, 1, codec.hidden, dtype=codec.dtype)
        if not count:
            return out
        start = 0 if codec.last_rows == "all" else sample.loss_mask.index(True, 1) - 1
        if codec.last_rows == "all" or all(sample.loss_mask[start + 1:start + 1 + count]):
            codec.decode(raw, out[start:start + count])
        else:
            packed = torch.empty(count, 1, codec.hidden, dtype=codec.dtype)
            codec.decode(raw, packed)
            out[codec.kept(sample.loss_mask)] = packed
        return out

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
        stored = Stored(self._shard(record), record, self.stored)
        stored.fetch([(TOKENS, MASK)], cold=False)
        return stored.section(TOKENS) == token_bytes(sample.tokens) \
            and stored.section(MASK) == mask_bytes(sample.loss_mask)

    def close(self) -> None:
        self._shards.clear()

    def faults(self, record: Record) -> Iterator[str]:
        """Everything that is wrong with a stored sample, each as a sentence that names it."""
        try:
            stored = Stored(self._shard(record), record, self.stored)
            stored.fetch([(ID, len(stored.places) - 1)], cold=True)
        except UserError as error:
            yield str(error)
            return
        found = [stored.fault(number) for number in range(len(self.stored.sections))]
        for fault in [*filter(None, found), *stored.contradictions()]:
            yield f"{stored.shard.path}, sample {stored.name()}: {fault}"

    def name(self, record: Record) -> str:
        """The id of a stored sample."""
        stored = Stored(self._shard(record), record, self.stored)
        stored.fetch([(ID, ID)], cold=False)
        return stored.name()

    def _find(self, sample: Sample) -> Record:
        record = self.index.find(sample.id) if self.has(sample.id) else None
        if record is None:
            torn = f" and a torn one ({self.index.tail})" if self.index.tail else ""
            raise UserError(f"{self.folder} has no hidden states of sample {sample.id}: expected its "
                            f"record in {self.index.path}, found {len(self.index)} of other samples{torn}; "
                            f"{again(self.folder)}")
        return record

    def _shard(self, record: Record) -> Shard:
        shard = self._shards.get(record.shard)
        if shard is None or len(shard.view) < record.end:
            with self._lock:
                shard = self._shards[record.shard] = Shard(shard_path(self.folder, record.shard), record.end)
                if len(self._shards) > MAPPED:  # whoever still copies from the oldest one keeps it alive
                    self._shards.pop(next(iter(self._shards)))
        return shard

    def _compare(self, stored: Stored, sample: Sample) -> None:
        """Raises unless the stored tokens and mask are those of the sample; says which of the two is at
        fault."""
        same = stored.record.tokens == len(sample.tokens)
        for number, word, own in ((TOKENS, "tokens", token_bytes(sample.tokens)),
                                  (MASK, "mask", mask_bytes(sample.loss_mask))):
            if same and bytes(stored.section(number)) == own:
                continue
            stored.require_sound([number], sample.id)
            pair = (sample.tokens, stored.tokens().tolist()) if word == "tokens" else \
                (sample.loss_mask, stored.mask().tolist())
            expected, found = _difference(*pair)
            raise UserError(f"{stored.shard.path} holds other {word} than sample {sample.id}: expected "
                            f"{expected}, found {found}; {again(self.folder)}")
        if (kept := int(self.stored.kept(sample.loss_mask).sum())) != stored.record.last:
            raise UserError(f"{stored.shard.path}, sample {sample.id}: section 'last' does not fit the mask: "
                            f"expected {kept} rows, found {stored.record.last}; {again(self.folder)}")


def _difference(expected: Sequence[object], found: Sequence[object]) -> tuple[str, str]:
    """In what two sequences differ, in words."""
    if len(expected) != len(found):
        return f"{len(expected)} tokens", f"{len(found)}"
    place = next(place for place, one in enumerate(expected) if one != found[place])
    return f"{expected[place]} at position {place}", f"{found[place]}"
