"""One call's work in two threads: while one waits for the disk or copies, the other does, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar
from weakref import finalize

__all__ = ["PART_BYTES", "SHARED_BYTES", "Helper"]

PART_BYTES = 1 << 19
"""Of one call and the checksums after it. A copy takes twice that of the processor's own cache, and a checksum of what
lies there takes half the time. Larger blocks are cut. Writing, too, comes before the checksum: xxhash keeps the other
thread waiting while it reads up to 64 KiB, and pwritev, which does not, is then the one that waits for the memory."""

SHARED_BYTES = 4 << 20
"""Of a call from which on a second thread pays: it takes 50 to 100 microseconds to wake up."""

T = TypeVar("T")
_Task = tuple["Future[None]", Callable[[], None]]


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
        self._asked: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._starting = Lock()
        finalize(self, self._asked.put, None)

    def work_off(self, own: deque[T], others: deque[T], work: Callable[[T], None]) -> None:
        """Do all the work of two queues, the second in the other thread; who is done first goes on with the rest.

        What `work` raises in either thread is raised when both have stopped, and what is left is not begun. So is what
        a signal raises here. The queues are empty afterwards.
        """
        help_ = self._ask((others, own), work)
        try:
            _drain((own, others), work)
        finally:
            _wait(help_, (own, others))
        if not help_.cancelled():
            help_.result()

    def _ask(self, queues: Sequence[deque[T]], work: Callable[[T], None]) -> Future[None]:
        help_: Future[None] = Future()
        try:
            with self._starting:
                if self._thread is None:
                    thread = Thread(target=_work, args=(self._asked,), name="kvist-disk", daemon=True)
                    thread.start()  # daemon: a disk that hangs must not hold up the end of the process
                    self._thread = thread
        except RuntimeError:  # no more threads are to be had
            help_.cancel()
        else:
            self._asked.put((help_, lambda: _drain(queues, work)))
        return help_

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()


def _work(asked: SimpleQueue[_Task | None]) -> None:
    """Do what is asked for, unless it was taken back, until nothing is."""
    while (task := asked.get()) is not None:
        help_, act = task
        if help_.set_running_or_notify_cancel():
            try:
                act()
            except BaseException as error:
                help_.set_exception(error)
            else:
                help_.set_result(None)
        del task, help_, act


def _wait(help_: Future[None], queues: Sequence[deque[Any]]) -> None:
    """Wait until help has stopped, which for help that has not begun is at once; only then raise what a signal does.

    Its buffers and slots are the caller's again afterwards.
    """
    interruption = None
    while True:
        try:
            if help_.cancel() or help_.done():
                break
            wait([help_])
        except BaseException as error:
            interruption = error
            for queue in queues:
                queue.clear()
    if interruption is not None:
        raise interruption


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
