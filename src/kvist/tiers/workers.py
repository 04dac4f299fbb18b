"""Calls with a deadline: made on other threads, and given up by the caller when they are late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Event, Thread
from typing import Any, Generic, TypeVar

__all__ = ["Busy", "Call", "Late", "Workers"]

T = TypeVar("T")


class Late(Exception):
    """The deadline has passed; the call may still be running, and nobody waits for it."""


class Busy(Exception):
    """No thread was free for the call."""


class Call(Generic[T]):
    """One call on its way; `is_wanted` turns false when the caller has given it up."""

    def __init__(self, act: Callable[[Call[T]], T]) -> None:
        self.is_wanted = True
        self.is_running = False
        self.done = Event()
        self._act = act
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, and keep what it returns or raises."""
        try:
            self._result = self._act(self)
        except BaseException as error:
            self._error = error

    @property
    def result(self) -> T:
        """What it returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """At most `num_threads` threads, begun when they are needed, and no interpreter waits for them to end."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._calls: deque[Call[Any]] = deque()
        self._num_begun = self._num_idle = self._num_late = 0
        self._is_stopped = False
        self._changed = Condition()

    def call(self, act: Callable[[Call[T]], T], timeout_s: float) -> T:
        """Return what `act` returns, or raise what it raises; it is given its `Call`.

        Raises:
            Late: it has not ended within the time limit, in which waiting for a thread counts, too.
            Busy: it was never begun, since every thread is held by a late call, or none came free in time, or all were
            stopped.
        """
        call = Call(act)
        self._submit(call)
        if not call.done.wait(timeout_s):
            self._give_up(call)
        return call.result

    def stop(self) -> None:
        """End all threads that are idle, and the others as soon as they are."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _submit(self, call: Call[Any]) -> None:
        with self._changed:
            if self._is_stopped or self._num_late == self._num_threads:
                raise Busy
            self._calls.append(call)
            if len(self._calls) > self._num_idle and self._num_begun < self._num_threads:
                self._num_begun += 1
                Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()

    def _give_up(self, call: Call[Any]) -> None:
        with self._changed:
            if call.done.is_set():
                return
            call.is_wanted = False
            if not call.is_running:
                self._calls.remove(call)
                raise Busy
            self._num_late += 1
        raise Late

    def _work(self) -> None:
        while self._has_worked():
            pass

    def _has_worked(self) -> bool:
        """Make one call; a function of its own, so that no idle thread keeps what its last call held."""
        call = self._next()
        if call is None:
            return False
        call.run()
        with self._changed:
            call.done.set()
            if not call.is_wanted:
                self._num_late -= 1
        return True

    def _next(self) -> Call[Any] | None:
        with self._changed:
            self._num_idle += 1
            while not self._calls and not self._is_stopped:
                self._changed.wait()
            self._num_idle -= 1
            if not self._calls:
                return None
            call = self._calls.popleft()
            call.is_running = True
            return call
