"""A store in memory whose calls a test can hold up, one kind at a time."""

from threading import Event

from kvist.tiers.simulated import SimulatedStore

PATIENT = 60.0
"""Seconds: a limit that is not reached, however busy the machine."""
SHORT = 0.02


class HangingStore(SimulatedStore):
    """Calls named in `held` wait, once they have begun, until `release`; `begun` tells that one waits."""

    def __init__(self, format):
        super().__init__(format)
        self.held, self.asked = set(), []
        self.begun, self.released = Event(), Event()

    def hold(self, *calls):
        self.released.clear()
        self.begun.clear()
        self.held = set(calls)

    def release(self):
        self.held = set()
        self.released.set()

    def passes(self, call):
        self.asked.append(call)
        if call in self.held:
            self.begun.set()
            assert self.released.wait(PATIENT)

    def contains(self, keys):
        self.passes("contains")
        return super().contains(keys)

    def put(self, entries):
        self.passes("put")
        return super().put(entries)

    def get(self, keys, buffers):
        self.passes("get")
        return super().get(keys, buffers)

    def drop(self, tag):
        self.passes("drop")
        super().drop(tag)

    def close(self):
        self.passes("close")
