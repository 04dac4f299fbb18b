"""The policies `slru` and `s3fifo`: queues of two segments, where newcomers must prove themselves first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from zlib import crc32

from kvist.core.eviction import SWEEP_MARGIN, Candidates
from kvist.core.extents import Extent, Twins

__all__ = ["Ghosts", "S3FifoQueue", "Segment", "SegmentedQueue", "SlruQueue", "Standing", "fingerprint"]


class Standing:
    """What a queue of two segments knows of an extent: from its first offer until it is evicted, or otherwise gone.

    `is_main` says in which segment it is or will be, `place` is its sort key there, `spent` the hits that have had
    their effect, `num_blocks` the blocks that it counts for there.
    """

    __slots__ = ("is_main", "num_blocks", "place", "spent")

    def __init__(self, place: int, *, is_main: bool) -> None:
        self.is_main = is_main
        self.place = place
        self.spent = self.num_blocks = 0


class Segment:
    """Candidates in the order of their places; entries whose ticket is void are skipped."""

    __slots__ = ("_heap", "num_blocks", "num_extents")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Extent]] = []
        self.num_extents = self.num_blocks = 0

    @property
    def num_entries(self) -> int:
        """Entries in memory, stale ones included."""
        return len(self._heap)

    def copy_from(self, other: Segment, twins: Twins) -> None:
        """Have the copies of extents in the order in which another segment has the originals."""
        self.num_extents, self.num_blocks = other.num_extents, other.num_blocks
        self._heap = [(place, ticket, twins[id(each)]) for place, ticket, each in other._heap if id(each) in twins]

    def enter(self, extent: Extent, standing: Standing) -> None:
        """Let an extent with a new ticket in, and count its blocks."""
        standing.num_blocks = extent.num_blocks
        self.num_blocks += standing.num_blocks
        self.num_extents += 1
        heappush(self._heap, (standing.place, extent.ticket, extent))

    def leave(self, standing: Standing) -> None:
        """Count an extent out whose ticket is void."""
        self.num_blocks -= standing.num_blocks
        self.num_extents -= 1
        if len(self._heap) > 2 * self.num_extents + SWEEP_MARGIN:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def first(self) -> Extent:
        """Return the extent of the least place; there must be one."""
        heap = self._heap
        while heap[0][2].ticket != heap[0][1]:
            heappop(heap)
        return heap[0][2]

    def extents(self) -> list[Extent]:
        """List all in here."""
        return [extent for _, ticket, extent in self._heap if extent.ticket == ticket]


class SegmentedQueue(Candidates):
    """Candidates in two segments, `newcomers` and `main`, whose sizes in blocks decide which of them gives the victim.

    What an extent has earned stays with it while it is in use. The blocks of a candidate are counted when it enters a
    segment, and again when it comes to the head of one: those that it lost in between to a split or to an eviction
    count until then.
    """

    __slots__ = ("_last_ticket", "_max_standings", "_standings", "main", "newcomers")

    def __init__(self) -> None:
        super().__init__()
        self.newcomers = Segment()
        self.main = Segment()
        self._standings: dict[Extent, Standing] = {}
        self._max_standings = SWEEP_MARGIN
        self._last_ticket = 0

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        assert isinstance(other, SegmentedQueue)
        self.num_candidates, self._last_ticket = other.num_candidates, other._last_ticket
        self.newcomers.copy_from(other.newcomers, twins)
        self.main.copy_from(other.main, twins)
        for extent, standing in other._standings.items():
            if id(extent) in twins:
                twin = self._standings[twins[id(extent)]] = Standing(standing.place, is_main=standing.is_main)
                twin.spent, twin.num_blocks = standing.spent, standing.num_blocks

    def _meet(self, extent: Extent) -> Standing:
        """Return the standing of an extent that is offered for the first time."""
        raise NotImplementedError

    def _rank(self, extent: Extent, standing: Standing) -> None:
        """Let an extent that is being offered have what it has earned since it was here last."""

    def _settle(self) -> Segment:
        """Move candidates between the segments as their sizes ask, and return the segment that gives the victim."""
        raise NotImplementedError

    def _note_evicted(self, extent: Extent, standing: Standing) -> None:
        """Remember what may be worth it of an extent that has been evicted."""

    @property
    def num_entries(self) -> int:
        """Everything kept in memory: candidates, stale entries, and what is known of extents in use."""
        return self.newcomers.num_entries + self.main.num_entries + len(self._standings)

    def offer(self, extent: Extent) -> None:
        """Make an extent that is not in the queue a candidate, in the segment that it belongs to."""
        standing = self._standings.get(extent)
        if standing is None:
            if len(self._standings) >= self._max_standings:
                self._forget_the_gone()
            standing = self._standings[extent] = self._meet(extent)
        self._rank(extent, standing)
        self.num_candidates += 1
        self._enter(extent, standing)

    def _enter(self, extent: Extent, standing: Standing) -> None:
        self._last_ticket = extent.ticket = self._last_ticket + 1
        self._segment_of(standing).enter(extent, standing)

    def _segment_of(self, standing: Standing) -> Segment:
        return self.main if standing.is_main else self.newcomers

    def _move(self, extent: Extent, place: int, *, is_main: bool) -> None:
        """Give a candidate another place, maybe in the other segment."""
        standing = self._standings[extent]
        extent.ticket = 0
        self._segment_of(standing).leave(standing)
        standing.place, standing.is_main = place, is_main
        self._enter(extent, standing)

    def withdraw(self, extent: Extent) -> None:
        """Take an extent that is a candidate out of the queue."""
        standing = self._standings[extent]
        extent.ticket = 0
        self.num_candidates -= 1
        self._segment_of(standing).leave(standing)

    def first(self) -> Extent:
        """Return the candidate that goes first; there must be one."""
        while True:
            segment = self._settle()
            extent = segment.first()
            standing = self._standings[extent]
            lost = standing.num_blocks - extent.num_blocks
            if not lost:
                return extent
            standing.num_blocks -= lost
            segment.num_blocks -= lost

    def withdraw_first(self) -> None:
        """Take out the candidate that `first` has just returned, since all of it is evicted."""
        extent = self.first()
        self.withdraw(extent)
        self._note_evicted(extent, self._standings.pop(extent))

    def candidates(self) -> list[Extent]:
        """List all candidates, in no order that means anything."""
        return self.newcomers.extents() + self.main.extents()

    def _forget_the_gone(self) -> None:
        """Drop the standings of extents that left the tree while they were in use."""
        self._standings = {
            extent: standing
            for extent, standing in self._standings.items()
            if extent.ticket or extent.parent is not None
        }
        self._max_standings = 2 * len(self._standings) + SWEEP_MARGIN


class SlruQueue(SegmentedQueue):
    """Segmented LRU (Karedla, Love and Wherry, 1994): what has been hit is protected from what has not.

    An extent is protected, which is in `main`, once it has been hit, and victims are the least recently used of the
    newcomers. When more than a third of the candidates' blocks are protected, the least recently used of these become
    newcomers again, as if used just now, and stay that until they are hit again. A third, and not the four fifths that
    are usual: the latest turn of every conversation is a newcomer, and most of it will be hit.
    """

    __slots__ = ("_newest_use",)

    def __init__(self) -> None:
        super().__init__()
        self._newest_use = 0

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        assert isinstance(other, SlruQueue)
        super().copy_from(other, twins)
        self._newest_use = other._newest_use

    def _meet(self, extent: Extent) -> Standing:
        return Standing(extent.last_use, is_main=False)

    def _rank(self, extent: Extent, standing: Standing) -> None:
        self._newest_use = max(self._newest_use, extent.last_use)
        standing.place = max(standing.place, extent.last_use)
        if extent.hits > standing.spent:
            standing.spent, standing.is_main = extent.hits, True

    def _settle(self) -> Segment:
        newcomers, main = self.newcomers, self.main
        while main.num_extents and (2 * main.num_blocks > newcomers.num_blocks or not newcomers.num_extents):
            self._move(main.first(), self._newest_use, is_main=False)
        return newcomers


NUM_PROVEN, MAX_CREDIT = 2, 3


class Ghosts:
    """Fingerprints of extents evicted not long ago, the oldest first, for a bounded number of blocks in all."""

    __slots__ = ("_blocks_of", "num_blocks")

    def __init__(self) -> None:
        self._blocks_of: dict[int, int] = {}
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks_of)

    def copy_from(self, other: Ghosts) -> None:
        """Remember the same."""
        self._blocks_of, self.num_blocks = dict(other._blocks_of), other.num_blocks

    def add(self, fingerprint: int, num_blocks: int, max_blocks: int) -> None:
        """Remember an extent, and forget the oldest until no more than `max_blocks` are remembered."""
        self.take(fingerprint)
        self._blocks_of[fingerprint] = num_blocks
        self.num_blocks += num_blocks
        while self.num_blocks > max_blocks:
            self.take(next(iter(self._blocks_of)))

    def take(self, fingerprint: int) -> bool:
        """Forget an extent, and say whether it was remembered."""
        num_blocks = self._blocks_of.pop(fingerprint, 0)
        self.num_blocks -= num_blocks
        return num_blocks > 0


def fingerprint(extent: Extent) -> int:
    """Return what an extent can be recognized by when its content comes back: its place and its first block.

    Others may have the same; ghosts only steer the order. It does not depend on the process.
    """
    return (extent.start << 32) + crc32(extent.key or b"")


class S3FifoQueue(SegmentedQueue):
    """S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023), weighed by blocks.

    New extents are `newcomers`, in the order of their publication. While these have more than a tenth of the
    candidates' blocks the oldest of them goes, unless it has been hit `NUM_PROVEN` times: then it moves to the end of
    `main`. Otherwise the oldest of `main` goes; one that has been hit goes to the end instead, for up to `MAX_CREDIT`
    times in a row, a hit each. What goes as a newcomer is remembered as a ghost, and is in `main` at once when it comes
    back. Ghosts stand for as many blocks as ever were candidates at one time.
    """

    __slots__ = ("_last_place", "_max_blocks", "ghosts")

    def __init__(self) -> None:
        super().__init__()
        self.ghosts = Ghosts()
        self._max_blocks = 0
        self._last_place = 0

    @property
    def num_entries(self) -> int:
        """Everything kept in memory: candidates, stale entries, what is known of extents in use, and ghosts."""
        return super().num_entries + len(self.ghosts)

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        assert isinstance(other, S3FifoQueue)
        super().copy_from(other, twins)
        self.ghosts.copy_from(other.ghosts)
        self._max_blocks, self._last_place = other._max_blocks, other._last_place

    def _next_place(self) -> int:
        self._last_place += 1
        return self._last_place

    def _meet(self, extent: Extent) -> Standing:
        if self.ghosts.take(fingerprint(extent)):
            return Standing(self._next_place(), is_main=True)
        return Standing(extent.created, is_main=False)

    def _settle(self) -> Segment:
        newcomers, main = self.newcomers, self.main
        self._max_blocks = max(self._max_blocks, newcomers.num_blocks + main.num_blocks)
        while True:
            if newcomers.num_extents and (9 * newcomers.num_blocks > main.num_blocks or not main.num_extents):
                if not self._promotes(newcomers.first()):
                    return newcomers
            elif not self._spares(main.first()):
                return main

    def _promotes(self, extent: Extent) -> bool:
        """Move a newcomer to `main` if it has proved itself, and say whether it has."""
        standing = self._standings[extent]
        if extent.hits - standing.spent < NUM_PROVEN:
            return False
        standing.spent = extent.hits
        self._move(extent, self._next_place(), is_main=True)
        return True

    def _spares(self, extent: Extent) -> bool:
        """Move an extent to the end of `main` for one of its hits, and say whether it had one."""
        standing = self._standings[extent]
        credit = min(extent.hits - standing.spent, MAX_CREDIT)
        if credit <= 0:
            return False
        standing.spent = extent.hits - credit + 1
        self._move(extent, self._next_place(), is_main=True)
        return True

    def _note_evicted(self, extent: Extent, standing: Standing) -> None:
        if not standing.is_main:
            self.ghosts.add(fingerprint(extent), standing.num_blocks, self._max_blocks)
