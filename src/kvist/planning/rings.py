"""The blocks of sequences whose windows are written in place."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.config import CacheConfig, GroupSpec
from kvist.errors import NeverFits
from kvist.planning.loads import Load, ceil_div, check_count

__all__ = ["Ring", "largest_window", "ring_of"]


@dataclass(frozen=True, slots=True)
class Ring:
    """A sequence's blocks: its first tokens for ever, up to a block's end, then the ring in which the others go round.

    With an extra block the ring is longer by that, for beams, which share what they would overwrite.
    """

    block_size: int
    window: int
    sink_tokens: int = 0
    has_extra_block: bool = False

    @property
    def num_sink_positions(self) -> int:
        """Positions before the ring, the bubble behind the sinks included."""
        return ceil_div(self.sink_tokens, self.block_size) * self.block_size

    @property
    def num_ring_tokens(self) -> int:
        """Tokens that fit in the ring."""
        return self.window - self.sink_tokens + self.block_size * self.has_extra_block

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence at most."""
        return ceil_div(self.num_sink_positions + self.num_ring_tokens, self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Count the blocks of a sequence of that many tokens."""
        bubble = self.num_sink_positions - self.sink_tokens if num_tokens > self.sink_tokens else 0
        return min(ceil_div(num_tokens + bubble, self.block_size), self.max_blocks)

    def num_blocks_of_beams(self, load: Load) -> int:
        """Count the blocks of all beams: those of one, and for each other one those that it writes."""
        first = load.prompt_tokens - 1
        if (self._position(first) + 1) % self.block_size == 0:
            first += 1
        own = self._num_written(first, load.num_tokens)
        return self.num_blocks(load.num_tokens) + own * (load.num_beams - 1)

    def _position(self, token: int) -> int:
        if token < self.sink_tokens:
            return token
        return self.num_sink_positions + (token - self.sink_tokens) % self.num_ring_tokens

    def _num_written(self, first: int, end: int) -> int:
        """Count the blocks in which tokens first .. end-1 lie."""
        size, sinks, ring = self.block_size, self.num_sink_positions, self.num_ring_tokens
        num_sinks = 0
        if first < self.sink_tokens:
            num_sinks = ceil_div(min(end, self.sink_tokens), size) - first // size
            first = self.sink_tokens
        if first >= end:
            return num_sinks
        if end - first >= ring:
            return num_sinks + self.max_blocks - sinks // size
        begin, stop = self._position(first), self._position(first) + end - first
        if stop <= sinks + ring:
            return num_sinks + ceil_div(stop, size) - begin // size
        wrapped = min(ceil_div(stop - ring, size), begin // size) - sinks // size
        return num_sinks + self.max_blocks - begin // size + wrapped


def ring_of(config: CacheConfig, group: GroupSpec) -> Ring:
    """Return the ring of a "ring" group."""
    has_extra_block = config.max_beams > 1 and config.max_sequence_length > group.window
    return Ring(config.block_size, group.window, group.sink_tokens, has_extra_block)


def largest_window(num_blocks: int, load: int | Load, *, block_size: int, sink_tokens: int = 0) -> int:
    """Return the widest ring, in tokens, with which a sequence takes at most `num_blocks`; at most its length.

    Raises `NeverFits` if not even the narrowest does.

    >>> largest_window(8, 100, block_size=4), largest_window(30, 100, block_size=4)
    (32, 100)
    """
    check_count(num_blocks, "num_blocks", at_least=1)
    check_count(block_size, "block_size", at_least=1)
    check_count(sink_tokens, "sink_tokens", at_least=0)
    load = load if isinstance(load, Load) else Load(load)
    for window in range(min(num_blocks * block_size, load.num_tokens), sink_tokens, -1):
        ring = Ring(block_size, window, sink_tokens, load.num_beams > 1 and load.num_tokens > window)
        if ring.num_blocks_of_beams(load) <= num_blocks:
            return window
    raise NeverFits(
        f"{num_blocks} blocks of {block_size} tokens hold no window of more than {sink_tokens} sinks for "
        f"{load.num_beams} beams of {load.num_tokens} tokens"
    )
