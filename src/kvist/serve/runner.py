"""Runs the forward passes of a step: one for all sequences, or, where a model cannot mix them, one for each alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvist import KVCacheManager
from kvist.memory.arena import TorchMemory
from kvist.memory.tables import BatchTables
from kvist.serve.attention import PackedBatch, using_paged_attention
from kvist.serve.layers import ModelLayers, cache_argument
from kvist.serve.scheduler import Chunk
from kvist.serve.spans import lay_out
from kvist.serve.states import PassCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Computed", "Runner"]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed: `logits` `[chunks that are last, vocab_size]`, and recurrent states that wait for `store`.

    K and V are in the arena already: computing them again changes nothing, which is not so for states.
    """

    logits: Tensor
    states: tuple[tuple[PassCache, Tensor], ...]

    def store(self) -> None:
        """Write the states into the arena, so that the chunks can be committed."""
        for cache, blocks in self.states:
            cache.store(blocks)


class Runner:
    """One model over one arena."""

    def __init__(
        self, model: PreTrainedModel, layers: ModelLayers, manager: KVCacheManager, memory: TorchMemory
    ) -> None:
        self._model = model
        self._layers = layers
        self._manager = manager
        self._memory = memory
        self._groups = manager.config.groups
        group_of = {layer: index for index, group in enumerate(self._groups) for layer in group.layers}
        self._group_of = [group_of[layer] for layer in range(len(layers.specs))]
        self._is_packed = not layers.has_states and not layers.asks_for_positions

    def compute(self, chunks: Sequence[Chunk]) -> Computed:
        """Run the model on all chunks."""
        passes = [list(range(len(chunks)))] if self._is_packed else self._alike(chunks)
        logits, states, order = [], [], []
        for indices in passes:
            together = [chunks[index] for index in indices]
            batch = self._batch(together)
            cache, blocks = self._cache(batch, together)
            logits.append(self._forward(together, batch, cache))
            order += [index for index in indices if chunks[index].is_last]
            if cache is not None and blocks is not None:
                states.append((cache, blocks))
        together_again = logits[0] if len(logits) == 1 else torch.cat(logits)[np.argsort(order)]
        return Computed(together_again, tuple(states))

    def _alike(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Return the indices of chunks that can go through the model together, one a row.

        Attention keeps the sequences of a row apart by itself. A recurrent layer runs along its row, so each sequence
        takes a row of its own, rows are equally long, and all have a state or none has. A model that asks the cache for
        positions gets one answer for all rows.
        """
        alike: dict[tuple[int, int], list[int]] = {}
        for index, chunk in enumerate(chunks):
            start = chunk.start if self._layers.asks_for_positions else min(chunk.start, 1)
            alike.setdefault((chunk.num_tokens, start), []).append(index)
        return list(alike.values())

    def _batch(self, chunks: Sequence[Chunk]) -> PackedBatch:
        groups = [
            None
            if group.kind == "state"
            else lay_out(
                group, self._tables(chunks, index), self._memory.block_size, self._model.dtype, self._memory.device
            )
            for index, group in enumerate(self._groups)
        ]
        return PackedBatch(self._memory, self._layers, self._group_of, groups)

    def _cache(self, batch: PackedBatch, chunks: Sequence[Chunk]) -> tuple[PassCache | None, Tensor | None]:
        """Return the cache that the model is to be given, if any, and the blocks of the rows' states, int `[B]`."""
        blocks = None
        for index, group in enumerate(self._groups):
            if group.kind == "state":
                blocks = torch.from_numpy(self._tables(chunks, index).block_table[:, 0].copy())
        if blocks is None and not self._layers.latent and not self._layers.asks_for_positions:
            return None, None
        num_past = chunks[0].start
        return PassCache(batch, blocks if num_past else None, num_past), blocks

    def _forward(self, chunks: Sequence[Chunk], batch: PackedBatch, cache: PassCache | None) -> Tensor:
        """Run one pass; returns logits `[chunks that are last, vocab_size]`."""
        tokens = [np.asarray(chunk.request.tokens[chunk.start : chunk.end], np.int64) for chunk in chunks]
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        is_last = np.array([chunk.is_last for chunk in chunks])
        join = np.concatenate if self._is_packed else np.stack
        ends = np.cumsum([chunk.num_tokens for chunk in chunks])[is_last] - 1
        if not self._is_packed:
            # Rows are equally long, so they keep the logits of the same column, if any are wanted.
            ends = ends[:1] * 0 + chunks[0].num_tokens - 1
        arguments = {} if cache is None else {cache_argument(self._model): cache}
        model: Any = self._model
        with torch.inference_mode(), using_paged_attention(self._model.config):
            output = model(
                input_ids=self._to_device(np.atleast_2d(join(tokens))),
                position_ids=self._to_device(np.atleast_2d(join(positions))),
                use_cache=cache is not None,
                logits_to_keep=self._to_device(ends),
                kvist_batch=batch,
                **arguments,
            )
        logits: Tensor = output.logits
        return logits[0] if self._is_packed else logits[torch.from_numpy(is_last)].flatten(0, 1)

    def _tables(self, chunks: Sequence[Chunk], group: int) -> BatchTables:
        num_tokens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        return self._manager.tables([chunk.sequence for chunk in chunks], num_tokens, group=group)

    def _to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._memory.device, non_blocking=True)
