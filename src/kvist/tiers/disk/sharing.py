"""One call's work in two threads: while one waits for the disk or copies, the other does, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["PART_BYTES", "SHARED_BYTES", "Helper"]

PART_BYTES = 1 << 19
"""Of one call and the checksums after it. A copy takes twice that of the processor's own cache, and a checksum of what
lies there takes half the time. Larger blocks are cut. Writing, too, comes before the checksum: xxhash keeps the other
thread waiting while it reads up to 64 KiB, and pwritev, which does not, is then the one that waits for the memory."""

SHARED_BYTES = 4 << 20
"""Of a call from which on a second thread pays: it takes 50 to 100 microseconds to wake up."""

T = TypeVar("T")


class Helper:
    """A thread that helps those who call, one at a time; whoever finds it busy works alone.

    >>> done = []
    >>> helper = Helper()
    >>> helper.work_off(deque([1, 2, 3]), deque([4]), done.append)
    >>> sorted(done)
    [1, 2, 3, 4]
    >>> helper.close()
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvist-disk")  # which begins with the first work

    def work_off(self, own: deque[T], others: deque[T], work: Callable[[T], None]) -> None:
        """Do all the work of two queues, the second in the other thread; who is done first goes on with the rest.

        What `work` raises in either thread is raised when both have stopped, and what is left is not begun. The queues
        are empty afterwards.
        """
        help_ = self._asked((others, own), work)
        try:
            _drain((own, others), work)
        finally:
            if help_ is not None and not help_.cancel():  # nothing waits for help that has not begun
                wait([help_])
        if help_ is not None and not help_.cancelled():
            help_.result()

    def _asked(self, queues: Sequence[deque[T]], work: Callable[[T], None]) -> Future[None] | None:
        try:
            return self._thread.submit(_drain, queues, work)
        except RuntimeError:  # no more threads are to be had
            return None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


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
