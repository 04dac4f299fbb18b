"""The cache that a `transformers` model sees while an engine runs it: recurrent states, latents, and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from kvist.serve.attention import PackedBatch
from kvist.serve.layers import StatePart, load_states, state_tensors

__all__ = ["PassCache"]


class PassCache(Cache):
    """What the layers of one forward pass find and leave, beside the K and V that `paged_attention` reads and writes.

    Recurrent layers find copies of the states in `blocks` of the arena, one for each row of the pass, and change these:
    the arena itself is unchanged until `store`, so that a pass that fails can be run again. `blocks` int `[B]` is None
    where no row has a state yet. Latent layers get the latents of all tokens. `num_past` is the length that a row has
    before the pass, for models that ask for it.
    """

    def __init__(self, batch: PackedBatch, blocks: Tensor | None, num_past: int) -> None:
        self._memory = batch.memory
        self._layers = batch.layers
        super().__init__(layers=[_layer(batch, index, num_past) for index in range(len(self._layers.attention))])
        if blocks is not None:
            for layer, index, parts in self._recurrent():
                load_states(layer, parts, self._memory.read_states(index, blocks))

    def store(self, blocks: Tensor) -> None:
        """Write the states that the pass left into `blocks` int `[B]` of the arena."""
        for layer, index, parts in self._recurrent():
            self._memory.write_states(index, blocks, state_tensors(layer, parts))

    def _recurrent(self) -> Iterator[tuple[LinearAttentionLayer, int, Sequence[StatePart]]]:
        """Yield each recurrent layer with the index of its spec and what its state consists of."""
        for layer, index, parts in zip(self.layers, self._layers.states, self._layers.state_parts, strict=True):
            if index is not None:
                yield cast("LinearAttentionLayer", layer), index, parts


class _AttentionLayer(CacheLayerMixin):
    """A layer whose K and V are written and read by its attention, or, if latent, here."""

    def __init__(self, batch: PackedBatch, index: int, num_past: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch = batch
        self._index = index
        self._num_past = num_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the arena is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new K and V as they are; or, of a latent layer, store them and return those of all tokens."""
        if self._index not in self._batch.layers.latent:
            return key_states, value_states
        self._batch.write(self._index, key_states, value_states)
        return self._batch.gather(self._index)

    def get_seq_length(self) -> int:
        """Return how many tokens precede the pass."""
        return self._num_past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens after `query_length` new ones, 0)."""
        return self._num_past + query_length, 0

    def get_max_length(self) -> int:
        """-1: it has no limit of its own."""
        return -1


class _BothLayer(LinearAttentionLayer, _AttentionLayer):  # type: ignore[override]
    """A layer with attention beside a recurrent state."""

    def __init__(self, batch: PackedBatch, index: int, num_past: int, number_of_states: int) -> None:
        _AttentionLayer.__init__(self, batch, index, num_past)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


def _layer(batch: PackedBatch, index: int, num_past: int) -> Any:
    attends = batch.layers.attention[index] is not None
    if not (parts := batch.layers.state_parts[index]):
        return _AttentionLayer(batch, index, num_past) if attends else DummyLayer()
    number_of_states = 1 + max(key for _, key in parts)
    if attends:
        return _BothLayer(batch, index, num_past, number_of_states)
    return LinearAttentionLayer(number_of_states=number_of_states)
