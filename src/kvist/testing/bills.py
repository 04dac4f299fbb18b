"""How many blocks things take, counted plainly: by pool, at most, as if nothing were cached."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig, GroupSpec
from kvist.core.groups import RingGeometry, spans_of

__all__ = ["Bill", "Counts", "blocks_for"]

Counts = NDArray[np.int64]
"""Blocks by pool, `[num_pools]`."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold that many tokens."""
    return -(-num_tokens // block_size)


class Bill:
    """Counts blocks by pool for one configuration.

    `bubble` are the positions that a ring leaves unused, which all groups then have columns for. Counts are exact where
    `is_exact`: not with rings, that get blocks of their own for those that are shared, nor where windows get theirs
    chunk by chunk.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.max_chunk_tokens = config.max_chunk_tokens
        self._groups = config.groups
        self._rings: list[RingGeometry | None] = [span.ring for span in spans_of(config)]
        self._pool_of = config.pool_of
        self._num_pools = len(config.pool_num_blocks)
        rings = [ring for ring in self._rings if ring]
        self.bubble = max((ring.num_bubble_tokens for ring in rings), default=0)
        self.max_ring_tokens = min((ring.num_tokens for ring in rings), default=2**62)
        windows = any(group.kind in ("sliding", "chunked") for group in self._groups)
        self.is_exact = not rings and not (windows and self.max_chunk_tokens)

    def num_columns(self, num_tokens: int) -> int:
        """Return how many columns of a block table so many tokens take."""
        return blocks_for(num_tokens + self.bubble, self.block_size) if num_tokens else 0

    def growth(self, have: int, columns: int, num_tokens: int) -> Counts:
        """Count what a sequence takes to have so many columns and tokens: a ring that wraps, maybe all its blocks."""
        counts = np.zeros(self._num_pools, np.int64)
        for group, ring, pool in zip(self._groups, self._rings, self._pool_of, strict=True):
            if ring is not None:
                counts[pool] += max(min(columns, ring.num_blocks) - have, 0)
                counts[pool] += ring.num_blocks if num_tokens > ring.num_tokens else 0
            elif group.kind in ("full", "sliding", "chunked"):
                counts[pool] += columns - have
        return counts

    def chunk(self) -> Counts:
        """Count what the next chunk of a sequence takes at most, in groups that get their blocks chunk by chunk."""
        counts = np.zeros(self._num_pools, np.int64)
        for group, pool in zip(self._groups, self._pool_of, strict=True):
            if self.max_chunk_tokens and group.kind in ("sliding", "chunked"):
                counts[pool] += blocks_for(self.max_chunk_tokens, self.block_size) + 1
        return counts

    def prompt(self, num_tokens: int, num_beams: int = 1, num_encoder_tokens: int = 0) -> Counts:
        """Count what a prompt takes while it is computed: each beam has last blocks of its own, and a state."""
        wrapped = num_tokens > self.max_ring_tokens
        counts = self.copies(num_tokens, num_tokens // self.block_size, num_beams - 1, wrapped=wrapped)
        for group, ring, pool in zip(self._groups, self._rings, self._pool_of, strict=True):
            columns = self.num_columns(num_tokens)
            if group.kind == "state":
                columns = 1
            elif group.kind == "cross":
                columns = blocks_for(num_encoder_tokens, self.block_size)
            elif ring is not None:
                columns = min(columns, ring.num_blocks)
            elif group.kind != "full" and self.max_chunk_tokens:
                columns = min(columns, self._most_columns(group, self.max_chunk_tokens))
            counts[pool] += columns
        return counts

    def copies(self, num_tokens: int, num_shared: int, n: int, *, wrapped: bool) -> Counts:
        """Count what n copies of a sequence take that share so many columns; of rings that have wrapped, none."""
        counts = np.zeros(self._num_pools, np.int64)
        for group, ring, pool in zip(self._groups, self._rings, self._pool_of, strict=True):
            if group.kind == "state":
                counts[pool] += n
            elif ring is not None:
                end = min(self.num_columns(num_tokens), ring.num_blocks)
                counts[pool] += n * (end if wrapped else max(end - num_shared, 0))
            elif group.kind != "cross":
                counts[pool] += n * (self.num_columns(num_tokens) - num_shared)
        return counts

    def _most_columns(self, group: GroupSpec, max_chunk_tokens: int) -> int:
        """Return how many columns the last tokens that a window shows and a chunk can touch, with the sinks' before."""
        num_tokens = (group.window or group.chunk_tokens) - 1 + max_chunk_tokens
        return blocks_for(num_tokens - 1, self.block_size) + 1 + blocks_for(group.sink_tokens, self.block_size)
