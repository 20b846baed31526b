"""How the hidden states of a sample become bytes, and come back.

A stored sample is a row of sections: `id` (utf-8), `tokens` (int32), `mask` (one bit a token, the first in
the lowest bit), one section for each layer, and `last`. A section of rows is [rows, hidden] in the states'
own dtype (`native`), or one bf16 scale for each row followed by the rows in e4m3 (`float8_e4m3fn`).

The scale of a row is its largest magnitude / 448, rounded up to bf16, so that nothing overflows. An element
is then off by at most 1/16 of itself, or by scale / 1024 where it is that small; together with the final
rounding to bf16 a row is off by at most `ROW_ERROR` of its norm, and by about 2.6 % for ordinary rows.

Of `last`, a loss reads row i only where token i + 1 is supervised. `last_rows` says which rows are kept; the
others come back as zeros. A source that does not store passes its states through `roundtrip`, and so gives
the same bits as one that does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.hidden_states.base import LastRows, Manifest, Storage
from trainer.records import HiddenStates, Sample

HEAD = ("id", "tokens", "mask")  # the sections before the layers
ALIGNMENT = 64  # bytes; a section starts at a multiple, counted from the start of the sample
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 2.0 ** -126  # the smallest normal number; a row of zeros has this scale
ROW_ERROR = 0.0665  # 1/16 for e4m3, 1/256 for bf16, and a little for elements near zero
ROUNDING = 1 - 2.0 ** -7  # of a scale: what is larger than this share of a dtype's range may overflow
SCALE_BYTES = 2
LARGEST_SCALE = 2.0 ** 7  # that times 2 ** 120 is a number; larger ones take the slow way
BLOCK = 1 << 17  # elements that are decoded at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# per dtype: the bits of a magnitude, and those of the smallest that is infinite or no number
MAGNITUDES = {torch.float32: (0x7FFFFFFF, 0x7F800000), torch.bfloat16: (0x7FFF, 0x7F80),
              torch.float16: (0x7FFF, 0x7C00), torch.float8_e4m3fn: (0x7F, 0x7F)}


@dataclass(frozen=True)
class Codec:
    """`layers` are those of the stored sample, ascending; `dtype` is what a reader gets."""

    storage: Storage
    dtype: torch.dtype
    layers: tuple[int, ...]
    hidden: int
    last_rows: LastRows

    @classmethod
    def of(cls, manifest: Manifest, layers: Sequence[int] | None = None) -> Self:
        """For the manifest's layers, or for some of them."""
        taken = manifest.tap_layers if layers is None else sorted(set(layers))
        return cls(manifest.storage, getattr(torch, manifest.dtype), tuple(taken), manifest.hidden_size,
                   manifest.last_rows)

    @property
    def sections(self) -> tuple[str, ...]:
        return (*HEAD, *(f"layer {layer}" for layer in self.layers), "last")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer on the disk, its scale included."""
        return self.hidden * self.dtype.itemsize if self.storage == "native" else self.hidden + SCALE_BYTES

    def kept(self, mask: Sequence[bool]) -> Tensor:
        """Which rows of `last` are kept, [tokens] bool."""
        if self.last_rows != "supervised":
            return torch.full((len(mask),), self.last_rows == "all")
        return torch.tensor([*mask[1:], False], dtype=torch.bool)[:len(mask)]

    def check(self, sample: Sample, states: HiddenStates) -> None:
        """Raises unless `states` have the sample's tokens, these layers, and this dtype."""
        rows, found = len(sample.tokens), (states.taps, states.last)
        for name, tensor, width in zip(("taps", "last"), found, (len(self.layers), 1), strict=True):
            shape = (rows, width * self.hidden)
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                raise UserError(f"the engine returned {name} {list(tensor.shape)} in {tensor.dtype} for "
                                f"sample {sample.id}, expected {list(shape)} in {self.dtype}: {rows} tokens, "
                                f"layers {list(self.layers)}, hidden size {self.hidden}; give the engine the "
                                "dtype of hidden_states.dtype, and no cache of prefixes")
        if self.storage != "native" and (beyond := self._beyond(states)):
            least, most = self._range
            raise UserError(f"{beyond} rows of hidden states of sample {sample.id} would lose more than "
                            f"{ROW_ERROR:.2%} in storage {self.storage}: expected a largest magnitude from "
                            f"{least:.3g} to {most:.3g}, found less or more; set "
                            "hidden_states.storage=native")

    @property
    def _range(self) -> tuple[float, float]:
        """The largest magnitude of a row must lie here to be held in eight bits as exactly as promised."""
        return LARGEST * SMALLEST_SCALE, ROUNDING * torch.finfo(self.dtype).max

    def _beyond(self, states: HiddenStates) -> int:
        """Rows outside of that range; those of zeros and without a number are somebody else's business."""
        rows = torch.cat([states.taps, states.last], dim=-1).unflatten(-1, (-1, self.hidden))
        largest, (least, most) = rows.abs().amax(-1).float(), self._range
        return int(((largest > 0) & (largest < least) | (largest > most) & largest.isfinite()).sum())

    def places(self, id_bytes: int, tokens: int, last: int) -> list[tuple[int, int]]:
        """Start and end of every section, counted from the start of the sample; the last end is its length.
        An empty section takes no room."""
        head = _aligned(id_bytes)
        mask = _aligned(head + 4 * tokens)
        begin, size, step = _aligned(mask + (tokens + 7) // 8), tokens * self.row_bytes, self.step(tokens)
        end = begin + len(self.layers) * step
        layers = [(start, start + size) for start in range(begin, end, step)]
        final = end if last else layers[-1][1]
        return [(0, id_bytes), (head, head + 4 * tokens), (mask, mask + (tokens + 7) // 8), *layers,
                (final, final + last * self.row_bytes)]

    def step(self, rows: int) -> int:
        """Bytes from the start of one layer to the start of the next."""
        return _aligned(rows * self.row_bytes)

    def stored_bytes(self, id_bytes: int, tokens: int, last: int, alignment: int) -> int:
        """What a sample takes on the disk, up to where the next one may start."""
        return -(-self.places(id_bytes, tokens, last)[-1][1] // alignment) * alignment

    def encode(self, sample: Sample, states: HiddenStates) -> list[np.ndarray]:
        """The sections of a sample as arrays of bytes. `states` must be of these layers and this dtype."""
        taps = states.taps.unflatten(-1, (len(self.layers), self.hidden)).unbind(-2)
        rows = [*taps, states.last[self.kept(sample.loss_mask)]]
        head = (sample.id.encode(), token_bytes(sample.tokens), mask_bytes(sample.loss_mask))
        return [*(np.frombuffer(part, dtype=np.uint8) for part in head),
                *(self._pack(each).numpy() for each in rows)]

    def _pack(self, rows: Tensor) -> Tensor:
        """rows [n, hidden] -> [bytes] uint8."""
        if self.storage == "native":
            return rows.contiguous().view(torch.uint8).flatten()
        scales, codes = quantize(rows)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8).flatten()])

    def decode(self, raw: Tensor, out: Tensor) -> None:
        """raw [bytes] uint8, one section or several that follow each other -> out [rows, sections, hidden],
        which may be strided. For `native` this is the only copy."""
        rows, count, _ = out.shape
        if not rows:
            return  # an empty section is not aligned
        if self.storage == "native":
            out.copy_(self._native(raw, rows, count).permute(1, 0, 2))
        else:
            dequantize(*self._parts(raw, rows, count), out.permute(1, 0, 2))

    def unsound(self, raw: Tensor, rows: int) -> int:
        """How many rows of a stored section are all zero, or hold what is no number or infinite."""
        if not rows:
            return 0
        if self.storage == "native":
            return int((~sound(self._native(raw, rows, 1))).sum())
        scales, codes = self._parts(raw, rows, 1)
        return int((~(sound(codes) & sound(scales[..., None]) & (scales > 0))).sum())

    def _native(self, raw: Tensor, rows: int, count: int) -> Tensor:
        """The rows [count, rows, hidden] of `count` sections, over the memory of `raw`."""
        step = self.step(rows) // self.dtype.itemsize
        return raw.view(self.dtype).as_strided((count, rows, self.hidden), (step, self.hidden, 1))

    def _parts(self, raw: Tensor, rows: int, count: int) -> tuple[Tensor, Tensor]:
        """The scales [count, rows] and codes [count, rows, hidden], over the memory of `raw`."""
        step, split = self.step(rows), rows * SCALE_BYTES
        scales = raw[:len(raw) // 2 * 2].view(torch.bfloat16).as_strided((count, rows), (step // 2, 1))
        codes = raw[split:].as_strided((count, rows, self.hidden), (step, self.hidden, 1))
        return scales, codes.view(torch.float8_e4m3fn)

    def roundtrip(self, states: HiddenStates, mask: Sequence[bool]) -> HiddenStates:
        """What a reader would give for these states, had they been stored."""
        kept = self.kept(mask).to(states.last.device)
        last = states.last
        if self.last_rows != "all" or self.storage != "native":
            last = torch.zeros_like(last)
            last[kept] = self._through(states.last[kept])
        if self.storage == "native":
            return HiddenStates(states.taps, last)
        rows = states.taps.reshape(-1, self.hidden)
        return HiddenStates(self._through(rows).view(states.taps.shape), last)

    def _through(self, rows: Tensor) -> Tensor:
        return rows if self.storage == "native" else dequantize(*quantize(rows), torch.empty_like(rows))


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., hidden] in any float dtype -> scales [...] bf16, codes [..., hidden] e4m3."""
    wide = rows.float()
    scales = _rounded_up((wide.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE))
    return scales, (wide / scales.float()[..., None]).to(torch.float8_e4m3fn)


def dequantize(scales: Tensor, codes: Tensor, out: Tensor) -> Tensor:
    """Fills out [..., rows, hidden] with codes * scales, and returns it. A product has at most 12 significant
    bits, so that it is exact in float32 and rounded once.

    PyTorch converts e4m3 on the CPU element by element. Here the bits of a code are put where bf16 has its
    own, which is the same number divided by 2 ** 120; subnormal ones too. Blocks stay in the cache."""
    if not codes.numel():
        return out
    if codes.device.type != "cpu" or not scales.max() < LARGEST_SCALE:
        return out.copy_(codes.float() * scales.float()[..., None])
    wide = torch.float32 if out.dtype == torch.float16 else out.dtype
    factors, bits = (scales.float() * 2.0 ** 120).to(wide)[..., None], codes.view(torch.int8).numpy()
    rows, hidden = codes.shape[-2:]
    step = min(rows, max(1, BLOCK // hidden))
    moved = np.empty((step, hidden), dtype=np.int16)
    narrow = torch.from_numpy(moved).view(torch.bfloat16)
    for layer in np.ndindex(codes.shape[:-2]):
        for start in range(0, rows, step):
            place = (*layer, slice(start, start + step))
            count = min(step, rows - start)
            part = moved[:count]
            np.copyto(part, bits[place])  # which repeats the sign in the upper byte
            np.multiply(part, np.int16(16), out=part)
            np.bitwise_and(part, np.int16(-0x7810), out=part)  # 0x87F0: sign, exponent, mantissa
            if wide == torch.bfloat16:
                torch.mul(narrow[:count], factors[place], out=out[place])
            else:
                out[place] = narrow[:count].to(wide).mul_(factors[place])
    return out


def sound(rows: Tensor) -> Tensor:
    """Which rows of [..., hidden] are finite and not all zero, [...] bool; looks at the bits alone."""
    magnitude, beyond = MAGNITUDES[rows.dtype]
    largest = (rows.view(INTEGERS[rows.dtype.itemsize]) & magnitude).amax(-1)
    return (largest > 0) & (largest < beyond)


def bad_rows(states: HiddenStates, kept: Tensor) -> int:
    """Tokens of which any layer, or a `kept` row of the last state, is all zero, not a number or infinite."""
    good = sound(states.taps.unflatten(-1, (-1, states.last.shape[-1]))).all(-1)
    return int((~(good & (sound(states.last) | ~kept))).sum())


def token_bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def mask_bytes(mask: Sequence[bool]) -> bytes:
    return np.packbits(np.frombuffer(bytes(mask), dtype=np.uint8), bitorder="little").tobytes()


def _rounded_up(values: Tensor) -> Tensor:
    """Non-negative float32 -> the nearest bf16 that is not smaller."""
    return ((values.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
