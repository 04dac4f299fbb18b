"""Counters that several threads add to."""

from __future__ import annotations

from collections import Counter
from threading import Lock

from kvist.tiers.protocol import StoreStats

__all__ = ["Counts"]


class Counts:
    """The counting half of a store's `StoreStats`, by the names of its fields.

    >>> counts = Counts()
    >>> counts.add(num_hits=2, num_misses=1)
    >>> counts.stats(num_entries=7).num_hits
    2
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: Counter[str] = Counter()
        self._seconds = 0.0

    def add(self, **numbers: int) -> None:
        """Add to the counters that are named."""
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] += number

    def add_found(self, found: list[bool]) -> None:
        """Count what a look-up found as hits, the rest as misses."""
        num_hits = sum(found)
        self.add(num_hits=num_hits, num_misses=len(found) - num_hits)

    def add_call(self, seconds: float) -> None:
        """Count a call that took so long."""
        with self._lock:
            self._numbers["num_calls"] += 1
            self._seconds += seconds

    def stats(self, *, num_entries: int = 0, num_bytes: int = 0, capacity_bytes: int | None = None) -> StoreStats:
        """Return the counters beside what is held."""
        with self._lock:
            return StoreStats(num_entries, num_bytes, capacity_bytes, seconds=self._seconds, **self._numbers)
