"""The free blocks of one group in one tier: a stack in an int32 array, so that n blocks come and go as one slice."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out and takes back block ids 0 .. num_blocks-1.

    The free ids are the last `num_free` of an array: a stack that grows downwards. Blocks given back together are
    handed out together and in the same order, so that neighbours stay neighbours.

    >>> pool = BlockPool(5)
    >>> pool.take(3).tolist()
    [0, 1, 2]
    >>> pool.give(np.array([1, 2], np.int32))
    >>> pool.num_free, pool.take(3).tolist()
    (4, [1, 2, 3])
    """

    __slots__ = ("_free", "_ids", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self._free = np.arange(num_blocks, dtype=np.int32)
        # The same memory: copying a few ids costs half of what it costs in arrays, which are buffers to typing, too.
        self._ids: Any = self._free.data
        self.num_blocks = self.num_free = num_blocks

    def take(self, n: int) -> NDArray[np.int32]:
        """Take n blocks, n <= num_free; returns a view that holds only until the next `give`."""
        left = self.num_free - n
        if not 0 <= left <= self.num_free:
            raise AssertionError(f"{n} blocks asked of a pool with {self.num_free} free: the caller must check first")
        end = self.num_blocks - left
        taken = self._free[self.num_blocks - self.num_free : end]
        self.num_free = left
        return taken

    def take_into(self, table: memoryview, start: int, end: int) -> None:
        """Take blocks for the columns start .. end-1 of a row's table, int32 `[columns]`; so many must be free."""
        left = self.num_free - end + start
        if not 0 <= left <= self.num_free:
            raise AssertionError(
                f"{end - start} blocks asked of a pool with {self.num_free} free: the caller must check first"
            )
        stop = self.num_blocks - left
        table[start:end] = self._ids[stop - end + start : stop]
        self.num_free = left

    def give(self, blocks: NDArray[np.int32] | memoryview) -> None:
        """Give blocks back; each must have been taken."""
        n, stop = len(blocks), self.num_blocks - self.num_free
        if n > stop:
            raise AssertionError(f"{n} blocks given to a pool that lacks {stop}: given twice")
        self._ids[stop - n : stop] = blocks
        self.num_free += n

    def copy_from(self, other: BlockPool) -> None:
        """Have the same blocks free, in the same order, as another pool of this size."""
        self._free[:] = other._free
        self.num_free = other.num_free

    def free_blocks(self) -> NDArray[np.int32]:
        """Copy the ids that are free, in no order that means anything."""
        return self._free[self.num_blocks - self.num_free :].copy()
