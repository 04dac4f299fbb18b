"""The keys of an extent's children in order, so that the sibling that agrees longest is found by a bisect."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

__all__ = ["SortedKeys"]

MAX_RUN = 1024


class SortedKeys:
    """A sorted collection of distinct byte strings in runs of bounded length: adding one among 100,000 moves at most a
    run.

    >>> keys = SortedKeys([b"ab", b"ad"])
    >>> keys.add(b"ac")
    >>> keys.neighbours(b"ac0")
    [b'ac', b'ad']
    """

    __slots__ = ("_firsts", "_runs")

    def __init__(self, keys: Iterable[bytes]) -> None:
        ordered = sorted(keys)
        self._runs = [ordered[start : start + MAX_RUN // 2] for start in range(0, len(ordered), MAX_RUN // 2)] or [[]]
        self._firsts = [run[0] for run in self._runs[1:]]

    def __iter__(self) -> Iterator[bytes]:
        return (key for run in self._runs for key in run)

    def copied(self) -> SortedKeys:
        """Return a collection of the same keys."""
        twin = SortedKeys(())
        twin._runs, twin._firsts = [run[:] for run in self._runs], self._firsts[:]
        return twin

    def add(self, key: bytes) -> None:
        """Add a key that is not yet there."""
        at = bisect_right(self._firsts, key)
        run = self._runs[at]
        insort(run, key)
        if len(run) > MAX_RUN:
            self._runs[at : at + 1] = [run[: MAX_RUN // 2], run[MAX_RUN // 2 :]]
            self._firsts.insert(at, run[MAX_RUN // 2])

    def remove(self, key: bytes) -> None:
        """Remove a key that is there."""
        at = bisect_right(self._firsts, key)
        run = self._runs[at]
        del run[bisect_left(run, key)]
        if not run and len(self._runs) > 1:
            del self._runs[at]
            del self._firsts[max(at - 1, 0)]

    def neighbours(self, key: bytes) -> list[bytes]:
        """Return the greatest key below `key` and the least one not below it, where they exist.

        Of all keys, these two have the longest common prefix with `key`.
        """
        at = bisect_right(self._firsts, key) if self._firsts else 0
        run = self._runs[at]
        index = bisect_left(run, key)
        if 0 < index < len(run):
            return run[index - 1 : index + 1]
        below = run[index - 1 : index] if index else self._runs[at - 1][-1:] if at else []
        above = run[index : index + 1] or (self._runs[at + 1][:1] if at + 1 < len(self._runs) else [])
        return below + above
