"""Events from a list, and an index of them, for tests of what publishes."""

from collections import deque
from itertools import count
from threading import Condition, Event
from time import monotonic

from kvist.core.events import Cleared

PATIENT = 30.0
"""Seconds: a limit that is not reached, however busy the machine."""


class ListedSource:
    """Events that a test appends, taken each once."""

    def __init__(self, *events):
        self._events, self._changed = deque(events), Condition()

    def add(self, *events):
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    def poll(self, timeout_s):
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            taken = list(self._events)
            self._events.clear()
            return taken


def cleared(*ids, epoch=7):
    """Events that differ in their ids only."""
    return [Cleared(id, epoch, None, "reset") for id in ids]


def wait_until(holds):
    """Wait until something holds that no event tells of."""
    pause, deadline = Event(), monotonic() + PATIENT
    for _ in count():
        if holds():
            return
        assert monotonic() < deadline
        pause.wait(0.001)
