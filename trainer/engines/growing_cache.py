"""A key/value cache that grows in place by blocks, for batched decoding with rows that leave early.

The stock dynamic cache copies everything for each new token; at 96 rows on a CPU that costs a third of the
step. """

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 128  # tokens by which the buffers grow


class GrowingLayer(DynamicLayer):
    """Keys and values [rows, heads, tokens, head_dim] as views of larger buffers."""

    used = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[-2]
        if self.used == 0 or end > self.key_buffer.shape[-2]:
            self._grow(key_states, end)
        self.key_buffer[:, :, self.used:end] = key_states
        self.value_buffer[:, :, self.used:end] = value_states
        self.used = end
        return self._view()

    def _grow(self, like: Tensor, end: int) -> None:
        capacity = (end // BLOCK + 1) * BLOCK
        keys = like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])
        values = like.new_empty(keys.shape)
        if self.used:
            keys[:, :, :self.used], values[:, :, :self.used] = self.keys, self.values
        self.key_buffer, self.value_buffer = keys, values

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.key_buffer[:, :, :self.used], self.value_buffer[:, :, :self.used]
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]
        self._view()


class GrowingCache(DynamicCache):
    """All layers of a decoder, recurrent ones as transformers has them; `select` keeps some of the rows."""

    def select(self, rows: Tensor) -> None:
        for layer in self.layers:
            (layer.select if isinstance(layer, GrowingLayer) else layer.reorder_cache)(rows)


def growing_cache(config: Any) -> DynamicCache:
    cache, text = GrowingCache(config=config), config.get_text_config()
    cache.layers = [cache.layers[number] if recurrent else GrowingLayer()
                    for number, recurrent in enumerate(recurrent_layers(text))]
    return cache


def whole_cache(config: Any) -> DynamicCache:
    """The stock cache, of which sliding layers keep all tokens as well: only so can it be rewound."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer
                    for layer in cache.layers]
    return cache


def recurrent_layers(config: Any) -> list[bool]:
    """By layer of a (text) config, whether it keeps a state that cannot be taken back, and no keys."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [kind == "linear_attention" for kind in kinds]
