"""What of the past each group of layers still needs: pure functions of a sequence's length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig, GroupSpec, Kind

__all__ = ["RingGeometry", "Span", "spans_of"]

UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """Where the tokens of a ring group lie: the first `sink_tokens` for ever, the others round and round behind them.

    The sinks are followed by a bubble of `num_bubble_tokens` unused positions up to the next block boundary; the ring
    holds `num_ring_tokens`, `window - sink_tokens`, or a block more where beams share what they would overwrite. The
    formulas are those of TensorRT-LLM's cyclic cache.

    >>> ring = RingGeometry(block_size=4, window=10, sink_tokens=2, has_extra_block=False)
    >>> ring.num_bubble_tokens, ring.num_ring_tokens, ring.num_blocks
    (2, 8, 3)
    >>> [ring.position(token) for token in (0, 1, 2, 9, 10, 11)]
    [0, 1, 4, 11, 4, 5]
    """

    block_size: int
    window: int
    sink_tokens: int
    has_extra_block: bool

    @property
    def num_bubble_tokens(self) -> int:
        """Unused positions between the sinks and the ring."""
        return -self.sink_tokens % self.block_size

    @property
    def num_sink_positions(self) -> int:
        """Positions of the sinks and the bubble: where the ring begins."""
        return self.sink_tokens + self.num_bubble_tokens

    @property
    def num_ring_tokens(self) -> int:
        """Tokens that fit in the ring."""
        return self.window - self.sink_tokens + (self.block_size if self.has_extra_block else 0)

    @property
    def num_tokens(self) -> int:
        """Tokens up to which nothing is overwritten."""
        return self.sink_tokens + self.num_ring_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence at most."""
        return -(-(self.num_sink_positions + self.num_ring_tokens) // self.block_size)

    def position(self, token: int) -> int:
        """Return where in the sequence's blocks a token lies."""
        return int(self.positions(np.array([token]))[0])

    def positions(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the sequence's blocks tokens lie, int64 of the same shape."""
        ring = self.num_sink_positions + (tokens - self.sink_tokens) % self.num_ring_tokens
        return np.where(tokens < self.sink_tokens, tokens, ring)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks of a sequence of that many tokens."""
        bubble = self.num_bubble_tokens if num_tokens > self.sink_tokens else 0
        return min(-(-(num_tokens + bubble) // self.block_size), self.num_blocks)


@dataclass(frozen=True, slots=True)
class Span:
    """Which blocks a sequence of a group must have for its next token.

    Those are its first `num_sink_blocks` and all from `first_block` on. With `ring`, where its tokens lie.

    A window of 10 tokens over blocks of 4, ten tokens computed: the next token sees tokens 1 to 10, so the first block
    is still needed; with 13 computed it sees tokens 4 to 13.

    >>> span = Span("sliding", block_size=4, window=10)
    >>> [span.first_block(num_computed) for num_computed in (0, 9, 12, 13, 17)]
    [0, 0, 0, 1, 2]
    """

    kind: Kind
    block_size: int
    window: int = 0
    num_sink_blocks: int = 0
    chunk_tokens: int = 0
    checkpoint_blocks: int = 0
    ring: RingGeometry | None = None

    @property
    def slides(self) -> bool:
        """Whether blocks of a running sequence fall out of span."""
        return self.kind in ("sliding", "chunked")

    @property
    def num_most_blocks(self) -> int:
        """Blocks in span at most, counted back from where a sequence goes on; no bound where the first count, too."""
        if self.num_sink_blocks or self.kind in ("ring", "state"):
            return UNBOUNDED
        return -(-(self.window or self.chunk_tokens) // self.block_size) + 1

    def first_block(self, num_computed: int) -> int:
        """Return the first block, sinks apart, that the token after `num_computed` others needs."""
        if self.kind == "sliding":
            first = num_computed + 1 - self.window
            return first // self.block_size if first > 0 else 0
        if self.kind == "chunked":
            return num_computed // self.chunk_tokens * self.chunk_tokens // self.block_size
        if self.kind == "state":
            return max(num_computed - 1, 0) // self.block_size
        return 0

    def first_blocks(self, num_computed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `first_block` of many sequences, int64 of the same shape."""
        if self.kind == "sliding":
            return np.maximum(num_computed + 1 - self.window, 0) // self.block_size
        if self.kind == "chunked":
            return num_computed // self.chunk_tokens * self.chunk_tokens // self.block_size
        return np.zeros_like(num_computed)


def spans_of(config: CacheConfig) -> list[Span]:
    """Return the span of each group of a configuration."""
    return [_span(config, group) for group in config.groups]


def _span(config: CacheConfig, group: GroupSpec) -> Span:
    block_size = config.block_size
    ring = None
    if group.kind == "ring":
        has_extra_block = config.max_beams > 1 and config.max_sequence_length > group.window
        ring = RingGeometry(block_size, group.window, group.sink_tokens, has_extra_block)
    return Span(
        group.kind,
        block_size,
        window=group.window,
        num_sink_blocks=-(-group.sink_tokens // block_size),
        chunk_tokens=group.chunk_tokens,
        checkpoint_blocks=group.checkpoint_tokens // block_size,
        ring=ring,
    )
