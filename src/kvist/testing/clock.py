"""A clock that stands still until a test moves it."""

from __future__ import annotations

from kvist.errors import ArgumentError

__all__ = ["ManualClock"]


class ManualClock:
    """Gives seconds, as `clock=` of a manager, an engine or a guarded store; they pass when `advance` is called.

    `sleep` is `advance`, for what would wait.

    >>> clock = ManualClock()
    >>> clock.advance(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return what time it is, in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises ArgumentError for less than none."""
        if seconds < 0:
            raise ArgumentError(f"seconds is {seconds}, but a clock goes forward")
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.advance(seconds)
