"""Groups that need only a part of the past: their blocks are referenced one by one, and go before their extents do."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvist.core.copies import Copies
from kvist.core.extents import Extent, Twins
from kvist.core.groups import Span
from kvist.core.pool import BlockPool
from kvist.core.recording import EventRecorder
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["SpannedGroup"]

MIN_SWEPT = 1024
MAX_MIDDLES = 4096


class SpannedGroup:
    """What the tree keeps of one group whose sequences hold a bounded number of blocks.

    `emptied` are leaves that have just lost their last block here, and may have none at all.

    `references` counts, for each block of the tree, the sequences and pins that have it in span; `num_evictable` the
    tree's blocks that nobody has. The blocks in span at the end of an extent make all longer prefixes reachable, those
    one block before it a prompt that ends there (its last token is always computed), and those at its middle are what
    is left to go on from when its tail goes for the sake of another group. The others are spare, and go first.
    """

    __slots__ = (
        "_max_offered",
        "_max_spare",
        "_middles",
        "_num_ranked",
        "_offered",
        "_spare",
        "bit",
        "copies",
        "emptied",
        "index",
        "num_evictable",
        "pool",
        "recorder",
        "references",
        "span",
    )

    def __init__(self, index: int, span: Span, pool: BlockPool, references: NDArray[np.int32]) -> None:
        self.index = index
        self.bit = 1 << index
        self.span = span
        self.pool = pool
        self.references = references
        self.num_evictable = 0
        self._spare: list[tuple[int, int, int, Extent]] = []
        self._num_ranked = 0
        self._offered: list[Extent] = []
        self.emptied: list[Extent] = []
        self._max_offered = self._max_spare = MIN_SWEPT
        self._middles: deque[Extent] = deque(maxlen=MAX_MIDDLES)
        self.recorder: EventRecorder | None = None
        self.copies: Copies | None = None

    def copy_from(self, other: SpannedGroup, twins: Twins) -> None:
        """Count and rank the copies of extents as another group does the originals; references are copied apart."""
        self.num_evictable, self._num_ranked = other.num_evictable, other._num_ranked
        self._spare = [(*entry[:3], twins[id(entry[3])]) for entry in other._spare if id(entry[3]) in twins]
        self._middles.extend(twins[id(each)] for each in other._middles if id(each) in twins)
        self._offered = [twins[id(each)] for each in other._offered if id(each) in twins]

    # -- references ---------------------------------------------------------------------------------------------------

    def retain(self, blocks: NDArray[np.int32]) -> None:
        """Hold blocks of the tree, each named once."""
        references, at = self.references, blocks.astype(np.intp)  # indexing by int32 takes ten times as long
        counts = references[at]
        references[at] = counts + 1
        self.num_evictable -= len(counts) - int(np.count_nonzero(counts))

    def relinquish(self, blocks: NDArray[np.int32]) -> None:
        """End a hold of blocks of the tree, each named once."""
        references, at = self.references, blocks.astype(np.intp)
        counts = references[at] - 1
        references[at] = counts
        self.num_evictable += len(counts) - int(np.count_nonzero(counts))

    def retain_unheld(self, blocks: NDArray[np.int32]) -> None:
        """Hold blocks of the tree that nobody has."""
        self.references[blocks.astype(np.intp)] = 1
        self.num_evictable -= len(blocks)

    def relinquish_all(self, blocks: NDArray[np.int32]) -> None:
        """End the only hold of blocks of the tree."""
        self.references[blocks.astype(np.intp)] = 0
        self.num_evictable += len(blocks)

    def relinquish_each(self, blocks: NDArray[np.int32]) -> None:
        """End holds of blocks of the tree, which may be named more than once."""
        distinct, counts = np.unique(blocks, return_counts=True)
        left = self.references[distinct] - counts.astype(np.int32)
        self.references[distinct] = left
        self.num_evictable += len(left) - int(np.count_nonzero(left))

    def num_unheld(self, blocks: NDArray[np.int32]) -> int:
        """Count those of the tree's blocks that nobody has in span."""
        return len(blocks) - int(np.count_nonzero(self.references[blocks]))

    # -- what of an extent is needed ----------------------------------------------------------------------------------

    def spare_columns(self, extent: Extent, *, keep_middle: bool) -> NDArray[np.intp]:
        """Return the columns of an extent whose blocks matter least: those not in span at its end, nor at its middle.

        What only its holders can reach needs none but theirs.
        """
        column = extent.blocks[self.index]
        present = column >= 0
        if extent.key is None:
            return np.flatnonzero(present)
        num_full = len(extent.tokens) // (TOKEN_BYTES * self.span.block_size)
        # One block before the end, too: a prompt that ends there is to be found but for its last token.
        for end in (num_full // 2, max(num_full - 1, 0), num_full) if keep_middle else (max(num_full - 1, 0), num_full):
            present[self._first_in_span(extent, end) : end] = False
        present[num_full:] = False
        present[: max(self.span.num_sink_blocks - extent.start, 0)] = False
        return np.flatnonzero(present)

    def _first_in_span(self, extent: Extent, end: int) -> int:
        """Return the first of an extent's columns that is needed to go on after its first `end` ones."""
        if self.span.kind == "state":
            return max(self.last_block(extent, extent.start + end) - extent.start, 0)
        return max(self.span.first_block((extent.start + end) * self.span.block_size) - extent.start, 0)

    def last_hole(self, extent: Extent, first: int, end: int) -> int:
        """Return the last of the columns first .. end-1 on the path to an extent that has no block, or -1."""
        node = extent
        while end > first and node.parent is not None:
            start = node.start
            low = max(first, start)
            if low < end and not node.has_holes:
                end = low
            if low < end:
                column = node.blocks[self.index, low - start : end - start]
                if column.min() < 0:
                    return low + int(np.flatnonzero(column < 0)[-1])
                end = low
            node = node.parent
        return -1

    def last_block(self, extent: Extent, end: int) -> int:
        """Return the last of the columns before `end` on the path to an extent that has a block, or -1."""
        node = extent
        while end > 0 and node.parent is not None:
            start = node.start
            if start < end:
                present = np.flatnonzero(node.blocks[self.index, : end - start] >= 0)
                if len(present):
                    return start + int(present[-1])
                end = start
            node = node.parent
        return -1

    def reach(self, extent: Extent, end: int) -> int:
        """Return the longest prefix, in blocks and at most `end`, on the path to an extent that has all in its span."""
        span = self.span
        if span.kind == "state":
            return self.last_block(extent, end) + 1
        while end > 0:
            hole = self.last_hole(extent, span.first_block(end * span.block_size), end)
            if hole < 0:
                hole = self._last_sink_hole(extent, end) if span.num_sink_blocks else -1
            if hole < 0:
                return end
            end = hole
        return 0

    def _last_sink_hole(self, extent: Extent, end: int) -> int:
        return self.last_hole(extent, 0, min(self.span.num_sink_blocks, end))

    # -- spare blocks -------------------------------------------------------------------------------------------------

    def offer(self, extent: Extent, first: int = 0) -> None:
        """Note that an extent, and those above it down to column `first`, may have spare blocks."""
        node = extent
        while node.parent is not None:
            if not node.spare & self.bit:
                node.spare |= self.bit
                self._offered.append(node)
                if len(self._offered) > self._max_offered:
                    self._offered = [each for each in self._offered if each.parent is not None]
                    self._max_offered = 2 * len(self._offered) + MIN_SWEPT
            if node.start <= first:
                return
            node = node.parent

    def _rank_offered(self) -> None:
        """Put what was offered since into order: the least priority first, among equals the least recently used."""
        for extent in self._offered:
            self._num_ranked += 1
            rank = extent.keep.priority if extent.key is not None else -1
            heappush(self._spare, (rank, extent.last_use, self._num_ranked, extent))
        self._offered.clear()
        if len(self._spare) > self._max_spare:
            self._spare = [entry for entry in self._spare if entry[3].parent is not None]
            heapify(self._spare)
            self._max_spare = 2 * len(self._spare) + MIN_SWEPT

    def take_spare(self, wanted: int, reason: str) -> int:
        """Give spare blocks back to the pool, oldest extents first and from their heads; returns how many."""
        taken = 0
        self._rank_offered()
        while self._spare and taken < wanted:
            _, last_use, _, extent = heappop(self._spare)
            extent.spare &= ~self.bit
            if extent.parent is None:
                continue
            if extent.last_use > last_use:
                self.offer(extent, extent.start)
                self._rank_offered()
                continue
            taken += self._take(extent, self.spare_columns(extent, keep_middle=True), wanted - taken, reason)
            if taken >= wanted:
                self.offer(extent, extent.start)
            else:
                self._middles.append(extent)
        return taken

    def take_middles(self, wanted: int, reason: str) -> int:
        """Give the blocks at the middles of extents back that have no other spare ones; returns how many."""
        taken = 0
        while self._middles and taken < wanted:
            extent = self._middles.popleft()
            if extent.parent is not None:
                taken += self._take(extent, self.spare_columns(extent, keep_middle=False), wanted - taken, reason)
                if taken >= wanted:
                    self._middles.appendleft(extent)
        return taken

    def take_any(self, extent: Extent, wanted: int, reason: str) -> int:
        """Give blocks of an extent back that nobody has in span, whoever may miss them; returns how many."""
        return self._take(extent, np.flatnonzero(extent.blocks[self.index] >= 0), wanted, reason)

    def _take(self, extent: Extent, columns: NDArray[np.intp], wanted: int, reason: str) -> int:
        column = extent.blocks[self.index]
        free = columns[self.references[column[columns]] == 0][:wanted]
        if len(free):
            self.pool.give(column[free])
            column[free] = -1
            if self.recorder is not None:
                self.recorder.removed_in(extent, self.index, free, "device", reason)
            if self.copies is not None:
                self.copies.drop_in(extent, self.index, free, reason)
            extent.has_holes = True
            self.num_evictable -= len(free)
            if len(free) == len(columns) and extent.ticket:
                self.emptied.append(extent)
        return len(free)

    def fill(self, extent: Extent, columns: NDArray[np.intp], blocks: NDArray[np.int32]) -> None:
        """Give columns of an extent that have no blocks some, which nobody has in span yet."""
        extent.blocks[self.index, columns] = blocks
        self.num_evictable += len(columns)

    def empty(self, extent: Extent, columns: NDArray[np.intp]) -> None:
        """Take the blocks of columns of an extent back that nobody has in span."""
        self.pool.give(extent.blocks[self.index, columns])
        extent.blocks[self.index, columns] = -1
        extent.has_holes = True
        self.num_evictable -= len(columns)

    def give(self, column: NDArray[np.int32], *, has_holes: bool) -> int:
        """Give back the blocks of columns that leave the tree, which nobody may have in span; returns how many."""
        if has_holes:
            column = column[column >= 0]
        n = len(column)
        self.pool.give(column)
        self.num_evictable -= n
        return n
