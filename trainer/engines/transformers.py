"""The engine in this process: the target through transformers, slow and exact.

A group of prompts is decoded together, left-padded, until its last answer ends; finished rows leave the
batch, so the cost follows the answers. The same group always gives the same bits, which is why a killed run
can go on. """

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from trainer.engines.base import Group, Session, TargetEngine
from trainer.engines.drawing import generator, pick, tokens_of
from trainer.engines.growing_cache import growing_cache, recurrent_layers, whole_cache
from trainer.errors import UserError
from trainer.ranges import Amount, Count, Device, Dtype, SequenceLength, require_device
from trainer.records import Completion, HiddenStates, KeysValues, LastState, Sampling, Tap
from trainer.target_fit import load_model

SCORED = 256  # tokens whose logits are in float32 at once
CROWDED = 0.85  # finished rows leave when so few still run: each time the whole cache is copied


@dataclass(frozen=True)
class TransformersRuntime:
    """Where the target computes."""

    device: Device


class TransformersEngine(TargetEngine):
    """`dtype` of weights and activations; `batch` rows decode together; `prefill_tokens` bounds a pass."""

    every_tap: ClassVar[bool] = True

    def __init__(self, dtype: Dtype, batch: Count, prefill_tokens: Amount, max_length: SequenceLength,
                 trust_remote_code: bool, runtime: TransformersRuntime) -> None:
        self.dtype = getattr(torch, dtype)
        self.batch = batch
        self.prefill_tokens = prefill_tokens
        self._max_length = max_length
        self.trust_remote_code = trust_remote_code
        self.device = runtime.device
        self.folder: Path | None = None
        self.end_ids: tuple[int, ...] = ()
        self.model: Any = None
        self._capturing = threading.Lock()  # the hook that takes the last state sees every pass of the model

    @property
    def origin(self) -> str:
        """What changes the bits of hidden states is part of it."""
        more = f", prefill_tokens {self.prefill_tokens}" if self.prefill_tokens else ""
        return f"transformers {metadata.version('transformers')}{more}"

    @property
    def group(self) -> int:
        return self.batch

    @property
    def in_flight(self) -> int:
        return 0

    @property
    def max_length(self) -> int:
        return self._max_length

    def preflight(self) -> None:
        require_device(self.device, "hardware.device")

    def load(self, folder: Path, end_ids: Sequence[int]) -> Self:
        self.folder, self.end_ids = folder, tuple(end_ids)
        return self

    def __enter__(self) -> Self:
        assert self.folder is not None, "load() comes before the with statement"
        self.preflight()
        self.model = load_model(self.folder, self.dtype, self.trust_remote_code).to(self.device).eval()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.model = None

    def completions(self, groups: Iterable[Group], sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        for group in groups:
            yield from self._together([*group], [*group.values()], sampling)

    @torch.inference_mode()
    def _together(self, keys: Sequence[str], prompts: Sequence[Sequence[int]],
                  sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        self._check_lengths(prompts)
        start = time.perf_counter()
        answers: list[list[int]] = [[] for _ in prompts]
        generators = [generator(sampling.seed, key) for key in keys]
        slots, running = list(range(len(prompts))), set(range(len(prompts)))
        logits, cache, mask, position = self._prefill(prompts)
        seen = tokens_of(prompts, logits) if sampling.repetition_penalty != 1 else None
        for _ in range(sampling.max_new_tokens):
            picked = pick(logits, sampling, [generators[row] for row in slots], seen)
            if seen is not None:
                seen[torch.arange(len(slots), device=seen.device), picked] = True
            for row, token in zip(slots, picked.tolist(), strict=True):
                if row not in running:
                    continue
                answers[row].append(token)
                full = len(answers[row]) == sampling.max_new_tokens \
                    or len(prompts[row]) + len(answers[row]) == self.max_length
                if full or token in self.end_ids:
                    running.discard(row)
                    yield keys[row], Completion(tuple(answers[row]),
                                                "stop" if token in self.end_ids else "length",
                                                time.perf_counter() - start)
            if not running:
                break
            if len(running) <= CROWDED * len(slots):
                index = torch.tensor([slot for slot, row in enumerate(slots) if row in running])
                slots = [slots[slot] for slot in index.tolist()]
                index = index.to(self.device)
                picked, mask, position = picked[index], mask[index], position[index]
                seen = None if seen is None else seen[index]
                cache.select(index)
            position = position + 1
            mask = torch.cat([mask, mask.new_ones(len(slots), 1)], dim=1)
            logits = self.model(input_ids=picked[:, None], attention_mask=mask,
                                position_ids=position[:, None], **{cache_argument(self.model): cache},
                                logits_to_keep=1).logits[:, -1]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Runs all prompts, left-padded to the longest; returns next-token logits [B, V], cache, mask [B, T]
        and the position of each row's last token [B]."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt):] = torch.tensor(prompt)
            mask[row, width - len(prompt):] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = growing_cache(self.model.config)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1,
                            **{cache_argument(self.model): cache}).logits[:, -1]
        return logits, cache, mask, positions[:, -1]

    def _check_lengths(self, rows: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, rows))
        if longest >= self.max_length:
            raise UserError(f"a row has {longest} tokens but target_engine.max_length is {self.max_length}; "
                            "raise it or leave the row out")

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Sequence[int]],
                      tap_layers: Sequence[Tap]) -> Iterator[HiddenStates]:
        """Rows are taken in order, as many together as fit in `prefill_tokens`, right-padded (causal
        attention keeps padding out of every real position)."""
        start = 0
        while start < len(rows):
            end, width = start, 0
            while end < len(rows):
                wider = max(width, len(rows[end]))
                if end > start and wider * (end + 1 - start) > self.prefill_tokens:
                    break
                end, width = end + 1, wider
            yield from self._states_together(rows[start:end], tap_layers)
            start = end

    @torch.inference_mode()
    def likelihoods(self, rows: Iterable[Sequence[int]]) -> Iterator[list[float]]:
        """One row at a time: what is large is the logits, [T, V]."""
        for row in rows:
            self._check_lengths([row])
            ids = torch.tensor([list(row)], device=self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
            found = [part.float().log_softmax(-1).gather(1, following[:, None])[:, 0]
                     for part, following in zip(logits.split(SCORED), ids[0, 1:].split(SCORED), strict=True)]
            yield torch.cat(found).tolist()

    def session(self, tap_layers: Sequence[Tap]) -> Session:
        return TransformersSession(self.model, tap_layers, self.device)

    def _states_together(self, rows: Sequence[Sequence[int]],
                         tap_layers: Sequence[Tap]) -> Iterator[HiddenStates]:
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, :len(row)] = torch.tensor(row)
        with self._capturing:
            taps, last = capture(self.model, ids.to(self.device), tap_layers, use_cache=False)
        for number, row in enumerate(rows):
            yield HiddenStates(taps[number, :len(row)].cpu(), last[number, :len(row)].cpu())


def capture(model: Any, ids: Tensor, tap_layers: Sequence[Tap], **arguments: Any) -> tuple[Tensor, Tensor]:
    """Runs the decoder on `ids` [B, T] and returns taps [B, T, layers * hidden, or as wide as they are] and
    the last state [B, T, hidden].

    transformers reports the *normed* state at index N, so the last one is taken where the
    final norm reads it.
    """
    decoder = model.get_decoder()
    name = cache_argument(decoder)
    if name not in arguments and any(isinstance(tap, KeysValues) for tap in tap_layers):
        arguments |= {name: whole_cache(decoder.config), "use_cache": True}
    last: list[Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    try:
        states = decoder(input_ids=ids, output_hidden_states=True, **arguments).hidden_states
    finally:
        hook.remove()
    count = len(states) - 1

    def tapped(tap: Tap) -> Tensor:
        if isinstance(tap, KeysValues):
            layer = arguments[name].layers[_own_layer(decoder.config, tap.kind)]
            parts = (each[:, :, -ids.shape[1]:].transpose(1, 2).flatten(2)
                     for each in (layer.keys, layer.values))
            return torch.cat([*parts], dim=-1)
        return last[0] if isinstance(tap, LastState) or tap == count else states[tap]

    return torch.cat([tapped(tap) for tap in tap_layers], dim=-1), last[0]


def _own_layer(config: Any, kind: str) -> int:
    """0-based index of the last layer of this kind of attention that has keys and values of its own."""
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    return max(index for index in range(count) if kinds[index] == kind)


class TransformersSession(Session):
    """A sequence with its key/value cache. Recurrent layers cannot forget single tokens: their target reads
    those that stay of the last step once more, behind a copy of what was before it."""

    def __init__(self, model: Any, tap_layers: Sequence[Tap], device: str) -> None:
        self.model, self.tap_layers, self.device = model, tuple(tap_layers), device
        self.cache = whole_cache(model.config)
        self.recurrent = any(recurrent_layers(model.config.get_text_config()))
        self.length = 0

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.recurrent:
            self.before = copy.deepcopy(self.cache), self.length, list(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(self.length, self.length + len(tokens), device=self.device)[None]
        taps, last = capture(self.model, ids, self.tap_layers, position_ids=positions, use_cache=True,
                             **{cache_argument(self.model.get_decoder()): self.cache})
        self.length += len(tokens)
        logits = self.model.lm_head(self.model.get_decoder().norm(last))
        return logits[0].float(), taps[0]

    def rewind(self, length: int) -> None:
        if length < self.length and self.recurrent:
            self.cache, self.length, tokens = self.before
            assert length > self.length, "only tokens of the last step can be taken back"
            self.step(tokens[:length - self.length])
        elif length < self.length:
            self.cache.crop(length - self.length)
            self.length = length


def cache_argument(model: Any) -> str:
    """The name under which this release of transformers takes a key/value cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
