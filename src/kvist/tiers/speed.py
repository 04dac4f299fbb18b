"""How long a store takes, learnt from how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

__all__ = ["Speed"]

_WEIGHT = 0.2
"""Of the newest call in the averages: some ten calls count."""


class Speed:
    """Exponential averages over calls, from which a line is fitted: seconds = latency + bytes / bandwidth.

    What was learnt is forgotten `memory_s` after the last call: else a store that was slow once, and is not asked
    because of that, would be held to be slow for ever.

    >>> speed = Speed()
    >>> for num_bytes in [0, 1000, 3000] * 5:
    ...     speed.note(num_bytes, 0.001 + num_bytes / 1e6)
    >>> round(speed.seconds(0), 6), round(speed.seconds(2000), 6)
    (0.001, 0.003)
    """

    def __init__(self, memory_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory_s, self._clock = memory_s, clock
        self._last = 0.0
        self._num_bytes = self._seconds = self._spread = self._slope = 0.0
        self._is_known = False
        self._lock = Lock()

    def note(self, num_bytes: int, seconds: float) -> None:
        """Learn from a call that brought so many bytes in so many seconds."""
        with self._lock:
            if not self._is_current():
                self._num_bytes, self._seconds, self._spread, self._slope = num_bytes, seconds, 0.0, 0.0
            self._last, self._is_known = self._clock(), True
            more, longer = num_bytes - self._num_bytes, seconds - self._seconds
            self._num_bytes += _WEIGHT * more
            self._seconds += _WEIGHT * longer
            self._spread = (1 - _WEIGHT) * (self._spread + _WEIGHT * more * more)
            self._slope = (1 - _WEIGHT) * (self._slope + _WEIGHT * more * longer)

    def seconds(self, num_bytes: int, num_calls: int = 1) -> float:
        """Return how long so many calls for so many bytes together will take; 0 as long as nothing is known."""
        with self._lock:
            if not self._is_current():
                return 0.0
            latency, seconds_per_byte = self._line()
            return latency * num_calls + seconds_per_byte * num_bytes

    def _is_current(self) -> bool:
        return self._is_known and self._clock() - self._last <= self._memory_s

    def _line(self) -> tuple[float, float]:
        """Return latency and seconds a byte; calls that were all of one size tell only their quotient."""
        steepest = self._seconds / self._num_bytes if self._num_bytes else 0.0
        slope = self._slope / self._spread if self._spread else steepest
        slope = min(max(slope, 0.0), steepest)
        return self._seconds - slope * self._num_bytes, slope
