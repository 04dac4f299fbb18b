"""Writes batches of JSON lines to a file or a pipe."""

from __future__ import annotations

import logging
import os
import select
import selectors
import stat
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Self

from kvist.errors import ArgumentError
from kvist.wire.publishing import Outbox, PublisherStats

__all__ = ["FilePublisher"]

_log = logging.getLogger("kvist.wire")

_RECHECK_S = 0.1
"""How often a pipe that is full is asked again, so that `close` is noticed."""
_PIPE_BYTES = getattr(select, "PIPE_BUF", 512)
"""What a pipe that is ready takes without waiting."""


class FilePublisher:
    """Appends batches to a file, or writes them to a pipe, each handed to the system at once and whole.

    `target` is a path, or an open descriptor, which stays open; a batch is one or several lines of JSON, and ends with
    a newline or gets one. A path that is a named pipe is opened when somebody reads it; without a reader, or after it
    has died, batches are dropped and counted, and nobody waits. A reader that is slow fills the queue of
    `max_queue_size` batches, then others are dropped.

    Events have token ids, so a file that is made is its owner's alone (0600); one that is there keeps its rights.

    A file that would become longer than `rotate_bytes` is renamed to `{path}.1`, that to `{path}.2`, up to `num_kept`.
    What follows a line that was cut off, by a full disk or a process that was killed, begins on a line of its own.

    Raises:
        ArgumentError: a limit is out of range, or a descriptor is to be rotated.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | int,
        *,
        rotate_bytes: int | None = None,
        num_kept: int = 5,
        max_queue_size: int = 100_000,
    ) -> None:
        if rotate_bytes is not None and (rotate_bytes < 1 or num_kept < 1 or isinstance(target, int)):
            raise ArgumentError(f"rotate_bytes is {rotate_bytes}, num_kept {num_kept}: at least 1, and for paths only")
        self._path = None if isinstance(target, int) else Path(target)
        self._rotate_bytes, self._num_kept = rotate_bytes, num_kept
        self._num_published = self._num_errors = 0
        self._is_torn = False
        self._fd: int | None = None
        if isinstance(target, int):
            self._adopt(target)
        elif not _is_pipe(target):
            self._open()
        self._outbox = Outbox(max_queue_size)
        self._is_all_written = False
        self._thread = Thread(target=self._run, name="kvist file publisher", daemon=True)
        self._thread.start()

    def publish(self, batch: bytes) -> bool:
        """Queue a batch to be written, or drop and count it where there is no room; returns whether it is queued."""
        return self._outbox.put(batch)

    def skip(self) -> None:
        """Count a batch that could not be made as dropped; readers see it by the ids of events."""
        self._outbox.skip()

    def stats(self) -> PublisherStats:
        """Return what was done so far."""
        return PublisherStats(
            num_published=self._num_published,
            num_dropped=self._outbox.num_dropped,
            num_waiting=self._outbox.num_waiting,
            num_errors=self._num_errors,
        )

    def close(self, timeout_s: float = 1.0) -> bool:
        """Write what is queued, and close the file, within so long; returns whether all that was queued is written.

        A pipe that nobody reads holds this up until the limit. Closing twice is fine.
        """
        self._outbox.close(timeout_s)
        self._thread.join(timeout_s + _RECHECK_S)
        return self._is_all_written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._outbox, selectors.EVENT_READ)
                while not self._outbox.is_closed:
                    selector.select()
                    self._outbox.acknowledge()
                    self._write_waiting()
            num_dropped = self._outbox.num_dropped
            self._write_waiting()
            is_left = self._outbox.num_waiting or self._outbox.num_dropped != num_dropped
            self._is_all_written = not is_left
        except Exception:
            _log.exception("the file publisher has ended")
        finally:
            self._outbox.dispose()
            self._close()

    def _write_waiting(self) -> None:
        while monotonic() < self._outbox.deadline:
            taken = self._outbox.take()
            if taken is None:
                return
            try:
                self._write(taken[1] if taken[1].endswith(b"\n") else taken[1] + b"\n")
            except OSError as error:
                self._fail(error)
            else:
                self._num_published += 1

    def _fail(self, error: OSError) -> None:
        self._outbox.drop()
        self._num_errors += 1
        if self._num_errors == 1:
            _log.warning("events could not be written to %s: %s; more are only counted", self._path or "a pipe", error)
        if self._is_waited_for:
            self._close()

    def _write(self, batch: bytes) -> None:
        self._make_room(len(batch))
        if self._fd is None:
            self._open()
        if self._is_torn:
            batch = b"\n" + batch
        left = memoryview(batch)
        try:
            while left:
                num_written = self._write_some(left)
                self._size += num_written
                left = left[num_written:]
        finally:
            self._is_torn = bool(left) and (self._is_torn or len(left) < len(batch))

    def _write_some(self, left: memoryview) -> int:
        assert self._fd is not None
        if not self._is_waited_for:
            return os.write(self._fd, left)
        self._wait_for_reader(self._fd)
        with suppress(BlockingIOError):
            return os.write(self._fd, left[:_PIPE_BYTES])
        return 0

    def _wait_for_reader(self, fd: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_WRITE)
            while not selector.select(_RECHECK_S):
                if monotonic() >= self._outbox.deadline:
                    raise TimeoutError("nobody has read the pipe in time")

    # -- the file -----------------------------------------------------------------------------------------------------

    _size = 0
    _is_waited_for = False
    """Whether it is a pipe or socket, which may have to be waited for."""

    def _open(self) -> None:
        if self._path is None:
            raise BrokenPipeError("whoever read the pipe has gone")
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._adopt(os.open(self._path, how | getattr(os, "O_NONBLOCK", 0), 0o600))
        if self._size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                self._is_torn = file.read(1) != b"\n"

    def _adopt(self, fd: int) -> None:
        state = os.fstat(fd)
        self._is_waited_for = stat.S_ISFIFO(state.st_mode) or stat.S_ISSOCK(state.st_mode)
        self._size = state.st_size if stat.S_ISREG(state.st_mode) else 0
        self._fd = fd

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None and self._path is not None:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Begin a new file where this one would become too long."""
        if self._rotate_bytes is None or self._is_waited_for or not self._size or self._path is None:
            return
        if self._size + num_bytes <= self._rotate_bytes:
            return
        self._close()
        for number in range(self._num_kept - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
        self._size, self._is_torn = 0, False


def _is_pipe(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
