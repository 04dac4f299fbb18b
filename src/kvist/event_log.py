"""The event log of a manager, for other threads: what its calls have changed is taken from here, and nothing waits."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from time import monotonic
from typing import Protocol

from kvist.core.contents import Snapshot
from kvist.core.events import Event
from kvist.errors import ArgumentError, SequenceError

__all__ = ["EventLog", "Subscription"]


class Subscription:
    """Events for one reader, at most `max_events`: the oldest are lost where it is too slow, and counted. 0: none.

    `num_lost` says how many; gaps in the ids of events show where.
    """

    def __init__(self, max_events: int) -> None:
        if type(max_events) is not int or max_events < 0:
            raise ArgumentError(f"max_events is {max_events!r}, must be an int of at least 0")
        self.max_events = max_events
        self.num_lost = 0
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_closed = not max_events

    @property
    def is_closed(self) -> bool:
        """Whether no events come any more."""
        return self._is_closed

    def poll(self, timeout_s: float | None = 0.0) -> list[Event]:
        """Return all events that have come since the last call, oldest first; wait for some, at most so long.

        With None, until some come or the log is closed: what was published before is still returned then.
        """
        until = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while not self._events and not self._is_closed:
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            events = list(self._events)
            self._events.clear()
            return events

    def close(self) -> None:
        """Let no more events come, and wake who waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _publish(self, events: list[Event]) -> None:
        with self._changed:
            if self._is_closed:
                return
            num_lost = max(len(self._events) + len(events) - self.max_events, 0)
            self.num_lost += num_lost
            for _ in range(min(num_lost, len(self._events))):
                self._events.popleft()
            self._events.extend(events[-self.max_events :])
            self._changed.notify_all()


class Recorded(Protocol):
    """What a log asks its manager for."""

    def _take_events(self) -> list[Event]: ...

    def _snapshot(self) -> Snapshot: ...

    def _content_digest(self) -> str: ...


class EventLog(Subscription):
    """What a manager's calls have changed, in order. The thread that calls the manager publishes, any other reads.

    `flush` publishes what has happened since the last time, once a step; a `poll` by the thread that made the log does
    that first. Each further reader has a `subscribe` of its own. No reader can hold a step up.
    """

    def __init__(self, max_events: int, manager: Recorded) -> None:
        super().__init__(max_events)
        self._manager = weakref.ref(manager)  # which has the log, and is to go without a garbage collection
        self._owner = threading.get_ident()
        self._subscriptions: list[Subscription] = []

    def flush(self) -> int:
        """Publish what has happened since the last time; returns how many events that were."""
        manager = self._manager()
        events = [] if manager is None else manager._take_events()
        if events:
            self.publish(events)
        return len(events)

    def publish(self, events: list[Event]) -> None:
        """Hand events to all readers."""
        for each in (self, *self._subscriptions):
            each._publish(events)
        self._subscriptions = [each for each in self._subscriptions if not each.is_closed]

    def poll(self, timeout_s: float | None = 0.0) -> list[Event]:
        """Return all events published since the last call, oldest first; wait for some, at most so long."""
        if threading.get_ident() == self._owner and not self._is_closed:
            self.flush()
        return super().poll(timeout_s)

    def subscribe(self, max_events: int | None = None) -> Subscription:
        """Return a reader of its own for what is published from now on."""
        subscription = Subscription(self.max_events if max_events is None else max_events)
        self._subscriptions = [*self._subscriptions, subscription]
        return subscription

    def snapshot(self) -> Snapshot:
        """Return all that is cached now, and the id that the log goes on with; for the thread that calls the manager.

        What has happened up to now is published first, so a reader may skip events before that id.
        """
        self.flush()
        return self._alive()._snapshot()

    def content_digest(self) -> str:
        """Return SHA-256 over what is cached where, as `Contents.digest` of one who has followed all events."""
        self.flush()
        return self._alive()._content_digest()

    def _alive(self) -> Recorded:
        manager = self._manager()
        if manager is None:
            raise SequenceError("events: the manager is gone")
        return manager

    def close(self) -> None:
        """Publish what is left, and let all readers end once they have read it."""
        if not self._is_closed:
            self.flush()
            for each in self._subscriptions:
                each.close()
        super().close()
