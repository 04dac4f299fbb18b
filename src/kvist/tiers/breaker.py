"""When to stop asking a store that fails, and when to ask it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from kvist.errors import ArgumentError

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens after `num_failures` failures in a row; after `retry_s` it lets one call through, which decides.

    >>> now = 0.0
    >>> breaker = CircuitBreaker(num_failures=1, retry_s=5.0, clock=lambda: now)
    >>> breaker.admits(), breaker.note_failure(), breaker.admits()
    (True, True, False)
    >>> now = 5.0
    >>> breaker.admits(), breaker.admits()  # one call tries
    (True, False)
    >>> breaker.note_success(), breaker.admits()
    (None, True)
    """

    def __init__(
        self, num_failures: int = 3, retry_s: float = 5.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if num_failures < 1 or retry_s < 0:
            raise ArgumentError(f"num_failures {num_failures} must be at least 1, retry_s {retry_s} at least 0")
        self._num_failures, self._retry_s, self._clock = num_failures, retry_s, clock
        self._num_failed = 0
        self._retry_at: float | None = None
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        """Whether a call now would be refused."""
        with self._lock:
            return self._is_open()

    def admits(self) -> bool:
        """Say whether a call may be made; each that may must be followed by `note_success` or `note_failure`."""
        with self._lock:
            if self._is_open():
                return False
            if self._retry_at is not None:
                self._retry_at = self._clock() + self._retry_s
            return True

    def note_success(self) -> None:
        """Close: the store works."""
        with self._lock:
            self._num_failed, self._retry_at = 0, None

    def note_failure(self) -> bool:
        """Count a failure; return whether it is the one that opens."""
        with self._lock:
            self._num_failed += 1
            if self._num_failed < self._num_failures:
                return False
            was_closed, self._retry_at = self._retry_at is None, self._clock() + self._retry_s
            return was_closed

    def _is_open(self) -> bool:
        return self._retry_at is not None and self._clock() < self._retry_at
