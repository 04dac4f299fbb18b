"""What all publishers share: where events come from, how batches wait for a thread, and what was counted.

Rules that must not be broken, with their reasons:

- `publish` never waits, since the thread that calls it may be the one that computes.
- What was accepted before `close` is handed over before the thread ends, unless time runs out.
- What is dropped uses up a number all the same: a subscriber sees a gap, and knows that it has missed something.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event as Flag
from threading import Lock, Thread
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from kvist.core.events import Event
from kvist.errors import ArgumentError

__all__ = ["Encode", "EventSource", "Feed", "NullPublisher", "Outbox", "Publisher", "PublisherStats", "Pump"]

_log = logging.getLogger("kvist.wire")

Encode = Callable[[list[Event]], bytes]
"""Makes one batch of events."""


class EventSource(Protocol):
    """Something that events are taken from, each once."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Return the events that have come since the last call, in order; wait so long for the first, at most."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """What has become of batches: handed over, dropped, still waiting; then answers to requests for past ones.

    `num_dropped` batches found no room, came after the end, or could not be made or handed over. `num_errors` are
    failures of what is published to, and requests that were none.
    """

    num_published: int = 0
    num_dropped: int = 0
    num_waiting: int = 0
    num_replays: int = 0
    num_replayed: int = 0
    num_errors: int = 0


class Publisher(Protocol):
    """Takes encoded batches and hands them to whoever listens, on a thread of its own."""

    def publish(self, batch: bytes) -> bool:
        """Queue a batch, or drop and count it where there is no room; returns whether it is queued. Never waits."""

    def skip(self) -> None:
        """Count a batch that could not be made as dropped, so that subscribers see a gap."""

    def stats(self) -> PublisherStats:
        """Return what was done so far."""

    def close(self, timeout_s: float = 1.0) -> bool:
        """Hand over what is queued and end, within so long; returns whether all was handed over."""


class NullPublisher:
    """Takes batches and does nothing with them.

    >>> NullPublisher().publish(b"batch")
    True
    """

    def publish(self, batch: bytes) -> bool:
        """Forget a batch."""
        return True

    def skip(self) -> None:
        """Do nothing."""

    def stats(self) -> PublisherStats:
        """Return zeros."""
        return PublisherStats()

    def close(self, timeout_s: float = 1.0) -> bool:
        """Do nothing."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Outbox:
    """Batches that wait for one thread, numbered from 0 as they come; at most `max_waiting`, others are dropped.

    Any thread may `put`. The one that takes can wait for `fileno` to become readable beside its sockets; it then calls
    `acknowledge` and takes until there is nothing left.
    """

    def __init__(self, max_waiting: int) -> None:
        if max_waiting < 1:
            raise ArgumentError(f"max_waiting is {max_waiting}, but must be at least 1")
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._number = 0
        self._num_dropped = 0
        self._lock = Lock()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._is_woken = self._is_closed = False
        self.deadline = float("inf")
        """When the thread must have ended, on the monotonic clock; known once it is closed."""

    def put(self, batch: bytes) -> bool:
        """Append a batch, unless it is full or closed; returns whether it was."""
        with self._lock:
            number = self._number
            self._number += 1
            if self._is_closed or len(self._waiting) >= self._max_waiting:
                self._num_dropped += 1
                return False
            self._waiting.append((number, batch))
            self._wake()
            return True

    def skip(self) -> None:
        """Use up a number for a batch that there is not."""
        with self._lock:
            self._number += 1
            self._num_dropped += 1

    def take(self) -> tuple[int, bytes] | None:
        """Return the number of the next batch and the batch, None if there is none now."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def drop(self) -> None:
        """Count what was taken, and could not be handed over, as dropped."""
        with self._lock:
            self._num_dropped += 1

    @property
    def num_waiting(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    @property
    def num_dropped(self) -> int:
        """Batches that were dropped."""
        return self._num_dropped

    @property
    def is_closed(self) -> bool:
        """Whether no more batches come."""
        return self._is_closed

    def fileno(self) -> int:
        """Return the descriptor that is readable when there may be something to take, or to end."""
        return self._woken.fileno()

    def acknowledge(self) -> None:
        """Make the descriptor unreadable again, before taking."""
        with self._lock:
            self._is_woken = False
            with suppress(BlockingIOError):
                self._woken.recv(64)

    def close(self, timeout_s: float) -> None:
        """Take no more batches; the thread shall end within so long. Closing twice keeps the first limit."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.deadline = monotonic() + timeout_s
                self._wake()

    def dispose(self) -> None:
        """Close the descriptors, and drop what is left: the thread ends."""
        with self._lock:
            self._is_closed = self._is_woken = True
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            self._woken.close()
            self._waker.close()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._waker.send(b"\0")


class Pump:
    """Takes events from a source as they come and passes them on, on a thread of its own.

    What `pass_on` or the source raises is counted and logged, and the next events are taken all the same. The source is
    asked again every `wait_s`, which is how long `close` may take to be noticed.
    """

    def __init__(
        self, source: EventSource, pass_on: Callable[[list[Event]], None], *, wait_s: float = 0.1, name: str = "events"
    ) -> None:
        self.num_errors = 0
        self._source, self._pass_on, self._wait_s = source, pass_on, wait_s
        self._deadline = float("inf")
        self._is_ending = Flag()
        self._thread = Thread(target=self._run, name=f"kvist {name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> bool:
        """Pass on what the source has by now, and end, within so long; returns whether all was passed on."""
        self._deadline = monotonic() + timeout_s
        self._is_ending.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while monotonic() < self._deadline:
            is_ending = self._is_ending.is_set()
            events = self._poll(0.0 if is_ending else self._wait_s)
            if events:
                self._try(partial(self._pass_on, events))
            elif is_ending:
                return

    def _poll(self, timeout_s: float) -> list[Event]:
        taken: list[Event] = []
        if not self._try(lambda: taken.extend(self._source.poll(timeout_s))):
            self._is_ending.wait(timeout_s)
        return taken

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception:
            if not self.num_errors:
                _log.exception("events could not be passed on; later failures are only counted")
            self.num_errors += 1
            return False
        return True


class Feed(Pump):
    """Gives a publisher what a source has, encoded, one batch for all that has come.

    Events that the source has lost show as a gap of its ids, and events that cannot be encoded are none: either way the
    publisher skips a number, and subscribers see a gap.
    """

    def __init__(self, source: EventSource, encode: Encode, publisher: Publisher, *, wait_s: float = 0.1) -> None:
        self._encode, self._publisher = encode, publisher
        self._epoch, self._next_id = -1, 0
        super().__init__(source, self._publish, wait_s=wait_s, name="event feed")

    def _publish(self, events: list[Event]) -> None:
        if self._has_gap(events):
            self._publisher.skip()
        try:
            batch = self._encode(events)
        except Exception:
            self._publisher.skip()
            raise
        self._publisher.publish(batch)

    def _has_gap(self, events: list[Event]) -> bool:
        """Whether events are missing before or among these; ids count from 0 in each epoch."""
        has_gap = False
        for event in events:
            if event.epoch != self._epoch:
                self._epoch, self._next_id = event.epoch, 0
            has_gap |= event.id > self._next_id
            self._next_id = max(self._next_id, event.id + 1)
        return has_gap
