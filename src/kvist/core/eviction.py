"""Which cached content goes first: the queue of the extents that could be evicted now, in the order of a policy.

A policy that gives an extent a sort key when it is offered goes into `EvictionQueue`. One whose order depends on what
has been evicted, or on how much of the cache is of which kind, is a subclass of `Candidates` of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from kvist.core.extents import Extent, Twins

__all__ = [
    "SWEEP_MARGIN",
    "TICK_BITS",
    "CallersPolicy",
    "Candidates",
    "EvictionQueue",
    "Policy",
    "fifo",
    "lfu",
    "lru",
    "priority",
]

Policy = Callable[[Extent], Any]
"""Gives a candidate its sort key; the least goes first. Keys of one policy must be comparable with each other."""


TICK_BITS = 64
"""Ticks stay below 2**64, so a rank above these bits and a tick make one int, which compares faster than a tuple."""
SWEEP_MARGIN = 64
"""Stale entries that a queue may have beside as many as it has valid ones."""

Entry = tuple[Any, int, Extent]
"""A candidate's sort key, and its ticket when it was offered: another one by now means that the entry is stale."""


# -- policies that are sort keys --------------------------------------------------------------------------------------


def lru(extent: Extent) -> int:
    """Least recently used first."""
    return extent.last_use


def lfu(extent: Extent) -> int:
    """Least often hit first, among equals the least recently used."""
    return (extent.hits << TICK_BITS) + extent.last_use


def fifo(extent: Extent) -> int:
    """Published first, gone first."""
    return extent.created


def priority(extent: Extent) -> int:
    """Lowest retention priority first, among equals the least recently used."""
    return (extent.keep.priority << TICK_BITS) + extent.last_use


class CallersKey:
    """A key from a caller's policy. Keys that cannot be compared count as equal, since no order could be right."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: CallersKey) -> bool:
        try:
            return bool(self.key < other.key)
        except Exception:
            return False


class CallersPolicy:
    """A caller's callable as a policy that cannot fail: eviction goes on in the middle of calls that must not.

    What the callable raises is counted in `num_failures` and kept in `last_failure`; such an extent goes in no
    particular order.
    """

    def __init__(self, sort_key: Callable[[Extent], Any]) -> None:
        self._sort_key = sort_key
        self.num_failures = 0
        self.last_failure = ""

    def __call__(self, extent: Extent) -> CallersKey:
        """Return what the callable gives an extent, whatever that is."""
        try:
            return CallersKey(self._sort_key(extent))
        except Exception as failure:
            self.num_failures += 1
            self.last_failure = repr(failure)
            return CallersKey(None)


# -- queues -----------------------------------------------------------------------------------------------------------


class Candidates:
    """The extents that could be evicted now: what the tree tells an eviction policy, and asks of it.

    An extent is in here exactly while nothing refers to it and it has no children. The tree offers it when that becomes
    true, and withdraws it when somebody uses it; it may be offered again, under the same identity. It evicts what
    `first` returns, from its tail: if all of it goes, `withdraw_first` says so, else the extent stays a candidate with
    fewer blocks. A split takes the leading blocks of a candidate away; what is left stays one. `ticket` of an extent
    is nonzero while it is in here, and nobody else sets it.

    The order depends on the calls alone, so that equal histories evict equally in every process.
    """

    __slots__ = ("num_candidates",)

    def __init__(self) -> None:
        self.num_candidates = 0

    @property
    def num_entries(self) -> int:
        """Everything kept in memory: candidates, stale entries, and what is remembered of extents that left."""
        raise NotImplementedError

    @property
    def num_policy_failures(self) -> int:
        """How often a caller's policy has raised."""
        return 0

    @property
    def last_policy_failure(self) -> str:
        """What a caller's policy raised last, in words; empty if it never has."""
        return ""

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        raise NotImplementedError

    def offer(self, extent: Extent) -> None:
        """Make an extent that is not in the queue a candidate."""
        raise NotImplementedError

    def withdraw(self, extent: Extent) -> None:
        """Take an extent that is a candidate out of the queue."""
        raise NotImplementedError

    def first(self) -> Extent:
        """Return the candidate that goes first; there must be one."""
        raise NotImplementedError

    def withdraw_first(self) -> None:
        """Take out the candidate that `first` has just returned, since all of it is evicted."""
        raise NotImplementedError

    def candidates(self) -> list[Extent]:
        """List all candidates, in no order that means anything."""
        raise NotImplementedError


class EvictionQueue(Candidates):
    """Candidates in the order of the sort keys that a policy gave them when they were offered.

    Most policies give growing keys most of the time: such candidates wait in a row, and cost the same however many
    there are. A key less than the last one in the row goes into a heap. Withdrawing only voids the entry (`ticket` 0):
    stale entries are skipped, and swept out when they outnumber the rest. Among equal keys the extent offered first
    goes first.
    """

    __slots__ = ("_heap", "_last_ticket", "_policy", "_row")

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._row: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._last_ticket = 0

    @property
    def num_entries(self) -> int:
        """Everything kept in memory: candidates and stale entries."""
        return len(self._row) + len(self._heap)

    @property
    def num_policy_failures(self) -> int:
        """How often a caller's policy has raised."""
        return self._policy.num_failures if isinstance(self._policy, CallersPolicy) else 0

    @property
    def last_policy_failure(self) -> str:
        """What a caller's policy raised last, in words; empty if it never has."""
        return self._policy.last_failure if isinstance(self._policy, CallersPolicy) else ""

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        assert isinstance(other, EvictionQueue)
        self.num_candidates, self._last_ticket = other.num_candidates, other._last_ticket
        self._row = deque((*entry[:2], twins[id(entry[2])]) for entry in other._row if id(entry[2]) in twins)
        self._heap = [(*entry[:2], twins[id(entry[2])]) for entry in other._heap if id(entry[2]) in twins]

    def offer(self, extent: Extent) -> None:
        """Make an extent that is not in the queue a candidate, by its key as of now."""
        key, row = self._policy(extent), self._row
        self._last_ticket = extent.ticket = self._last_ticket + 1
        self.num_candidates += 1
        if row and key < row[-1][0]:
            heappush(self._heap, (key, extent.ticket, extent))
        else:
            row.append((key, extent.ticket, extent))

    def withdraw(self, extent: Extent) -> None:
        """Take an extent that is a candidate out of the queue."""
        extent.ticket = 0
        self.num_candidates -= 1
        if len(self._row) + len(self._heap) > 2 * self.num_candidates + SWEEP_MARGIN:
            self._row = deque(entry for entry in self._row if entry[2].ticket == entry[1])
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def first(self) -> Extent:
        """Return the candidate that goes first; there must be one."""
        return self._first_entry()[2]

    def _first_entry(self) -> Entry:
        row, heap = self._row, self._heap
        while row and row[0][2].ticket != row[0][1]:
            row.popleft()
        while heap and heap[0][2].ticket != heap[0][1]:
            heappop(heap)
        return heap[0] if heap and (not row or heap[0] < row[0]) else row[0]

    def withdraw_first(self) -> None:
        """Take out the candidate that `first` has just returned."""
        extent, row = self._first_entry()[2], self._row
        if row and row[0][1] == extent.ticket:
            row.popleft()
        else:
            heappop(self._heap)
        extent.ticket = 0
        self.num_candidates -= 1

    def candidates(self) -> list[Extent]:
        """List all candidates, in no order that means anything."""
        return [extent for each in (self._row, self._heap) for _, ticket, extent in each if extent.ticket == ticket]
