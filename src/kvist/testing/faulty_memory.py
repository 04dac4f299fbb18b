"""An oracle memory that fails when told to: before, between or inside its copies, and where stores read and fill it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.config import CacheConfig
from kvist.core.lower import DEVICE
from kvist.core.moves import Move, one_by_one
from kvist.testing.token_memory import NOTHING, TokenMemory

__all__ = ["FaultyMemory"]


class FaultyMemory(TokenMemory):
    """A `TokenMemory` whose next copies, reads or fillings fail.

    After `fail_next(after=k)`, the next `perform` makes k copies, tears the destination of the one that follows, and
    raises; the `times` performs that follow it fail at once. `fail_reads` and `fail_writes` let so many calls of
    `read_blocks` and `write_blocks` fail, these after half of the blocks. `num_failures` counts all of it.

    >>> from kvist import AttentionSpec, CacheConfig, HostTier, KVCacheManager, TransferError
    >>> config = CacheConfig([AttentionSpec(1, 1)], 2, 4, tiers=[HostTier(num_blocks=4)])
    >>> memory = FaultyMemory(config)
    >>> manager = memory.attach(KVCacheManager(config, memory))
    >>> first = manager.add_sequence([1, 2, 3, 4])
    >>> memory.write(first)
    >>> manager.commit([first])
    >>> manager.free(first)
    >>> memory.fail_next()
    >>> manager.evict(2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvist.errors.TransferError: the memory could not make 2 copies: ...
    >>> manager.check()
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.num_failures = 0
        self._is_behind = False
        self._after: int | None = None
        self._times = self._num_reads = self._num_writes = 0

    def fail_next(self, *, after: int = 0, times: int = 1) -> None:
        """Let the next `perform` fail after so many copies, and so many in all."""
        self._after, self._times = after, times

    def work_again(self) -> None:
        """Let nothing fail any more that has not yet."""
        self._after, self._times, self._num_reads, self._num_writes = None, 0, 0, 0

    def fail_reads(self, times: int = 1) -> None:
        """Let stores not read blocks, so many times."""
        self._num_reads = times

    def fail_writes(self, times: int = 1) -> None:
        """Let stores not fill blocks, so many times."""
        self._num_writes = times

    @property
    def has_failed(self) -> bool:
        """Whether copies have failed that are still to be made."""
        return self._is_behind

    def perform(self, moves: Iterable[Move], *, late: bool = False) -> None:
        """Make copies, or fail on the way."""
        moves = list(moves)
        if self._after is None:
            super().perform(moves, late=late or self._is_behind)
            self._is_behind = self._is_behind and self._more_come(moves)
            return
        made, self._is_behind = min(self._after, len(moves)), True
        super().perform(moves[:made], late=True)
        self._times -= 1
        self._after = 0 if self._times else None
        for move in moves[made : made + 1]:
            self._tear(move)
        raise self._failure(f"copy {made} of {len(moves)}")

    def _more_come(self, moves: list[Move]) -> bool:
        """Say whether the manager has copies made in several calls, of which these are not the last."""
        ordered = [] if self._manager is None else one_by_one(self._manager._state.moves)
        return bool(ordered) and ordered[-1:] != moves[-1:]

    def read_blocks(self, group: int, blocks: NDArray[np.int32], tier: str = DEVICE) -> NDArray[np.uint8]:
        """Read blocks, or fail."""
        if self._num_reads:
            self._num_reads -= 1
            raise self._failure("blocks could not be read")
        return super().read_blocks(group, blocks, tier)

    def write_blocks(self, group: int, blocks: NDArray[np.int32], rows: NDArray[np.uint8]) -> None:
        """Fill blocks, or half of them, and fail."""
        if not self._num_writes:
            super().write_blocks(group, blocks, rows)
            return
        self._num_writes -= 1
        half = len(blocks) // 2
        super().write_blocks(group, blocks[:half], rows[:half])
        self.group_slots(group)[blocks[half:]] = NOTHING
        raise self._failure("blocks could not be filled")

    def _tear(self, move: Move) -> None:
        slots = self.group_slots(move.group, move.destination_tier)
        if move.destination != move.source or move.destination_tier != move.source_tier:
            begin = move.destination_offset
            slots[move.destination, begin : begin + move.num_tokens] = NOTHING

    def _failure(self, what: str) -> Any:
        self.num_failures += 1
        return OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {what}")
