"""When the priorities of content that nobody uses any more end."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvist.core.extents import Extent, Twins
from kvist.core.retention import DEFAULT_PRIORITY

__all__ = ["Expiries"]

MIN_SWEPT = 1024


class Expiries:
    """Extents with a priority for a time, by the moment when that ends; one that is used again waits anew.

    `entries` are not empty while some wait, or have waited until they were used again.
    """

    __slots__ = ("_max_entries", "_num_awaited", "entries")

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, int, Extent]] = []
        self._max_entries = MIN_SWEPT
        self._num_awaited = 0

    def copy_from(self, other: Expiries, twins: Twins) -> None:
        """Await for the copies of extents what others await for the originals."""
        self._num_awaited = other._num_awaited
        self.entries = [(*entry[:3], twins[id(entry[3])]) for entry in other.entries if id(entry[3]) in twins]

    def wait(self, extent: Extent, now_s: float) -> None:
        """Note when the priority of an extent that nobody uses any more ends, if it does."""
        priority, duration_s = extent.keep
        if duration_s is not None and priority != DEFAULT_PRIORITY:
            self._num_awaited += 1
            if len(self.entries) > self._max_entries:
                self._sweep()
            heappush(self.entries, (now_s + duration_s, self._num_awaited, extent.last_use, extent))

    def _sweep(self) -> None:
        """Drop the entries that were overtaken by a later use, so that they do not pile up."""
        self.entries = [entry for entry in self.entries if _is_due(entry[3], entry[2])]
        heapify(self.entries)
        self._max_entries = 2 * len(self.entries) + MIN_SWEPT

    def take_due(self, now_s: float) -> list[Extent]:
        """Return the extents whose time is over, in order; they wait no more."""
        due = []
        while self.entries and self.entries[0][0] <= now_s:
            _, _, last_use, extent = heappop(self.entries)
            if _is_due(extent, last_use):
                due.append(extent)
        return due


def _is_due(extent: Extent, last_use: int) -> bool:
    """Say whether nobody has used an extent since."""
    return not extent.references and extent.parent is not None and extent.last_use == last_use
