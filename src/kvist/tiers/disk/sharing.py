"""One call's work in two threads: while one waits for the disk or copies, the other does, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import TypeVar

__all__ = ["work_off"]

T = TypeVar("T")


def work_off(own: deque[T], others: deque[T], work: Callable[[T], None]) -> None:
    """Do all the work of two queues, the second in a thread of its own; whoever is done first goes on with the other's.

    What `work` raises in either thread is raised when both have stopped, and what is left is not begun. The queues are
    empty afterwards; `work` may empty them to stop.

    >>> done = []
    >>> work_off(deque([1, 2, 3]), deque([4]), done.append)
    >>> sorted(done)
    [1, 2, 3, 4]
    """
    helper = _Helper(partial(_drain, (others, own), work))
    try:
        helper.start()
    except RuntimeError:  # no more threads are to be had
        _drain((own, others), work)
        return
    try:
        _drain((own, others), work)
    finally:
        helper.join()
    if helper.error is not None:
        raise helper.error


class _Helper(Thread):
    """Makes one call; `error` is what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(name="kvist-disk", daemon=True)
        self.error: BaseException | None = None
        self._call = call

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error


def _drain(queues: Sequence[deque[T]], work: Callable[[T], None]) -> None:
    """Work until nothing is left; an error leaves nothing to do for others either."""
    try:
        for queue in queues:
            while queue:
                try:
                    task = queue.popleft()
                except IndexError:  # the other thread was faster
                    break
                work(task)
    except BaseException:
        for queue in queues:
            queue.clear()
        raise
