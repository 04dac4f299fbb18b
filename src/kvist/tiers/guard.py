"""Keeps a slow, full or dead store from holding up its caller: no call takes longer than its time limit.

What must not be broken: a buffer that a late call may still write is never one that anybody reads or reuses. So a store
fills new buffers of the guard's own, and only those of a lot that has come in time are handed on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from threading import Thread
from typing import TypeVar

import numpy as np

from kvist.errors import ArgumentError
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.counting import Counts
from kvist.tiers.missed import MissedKeys
from kvist.tiers.protocol import Store, StoreStats
from kvist.tiers.speed import Speed
from kvist.tiers.workers import Busy, Call, Late, Workers
from kvist.tiers.writing import Entries, WriteQueue

__all__ = ["GuardedStore", "Limits"]

T = TypeVar("T")
_Arrival = list[tuple[int, memoryview]]
_log = logging.getLogger("kvist.tiers")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of this process a guarded store may take.

    At most `num_threads` calls are under way; `max_queued_bytes` of contents wait to be written. A store is asked for
    `lot_bytes` and `lot_entries` at a time at most, so that of a long read, what came before the deadline counts. What
    could not be dropped is tried again every `retry_s`.
    """

    num_threads: int = 4
    max_queued_bytes: int = 64 << 20
    lot_bytes: int = 16 << 20
    lot_entries: int = 256
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_threads", "lot_bytes", "lot_entries"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, but must be at least 1")


_USUAL = Limits()


class GuardedStore:
    """A store whose calls all end within `timeout_s`, and which never raises for what the guarded one does.

    A call that is late, fails or is refused finds nothing. Too many failures in a row open the `breaker`, and the store
    is not asked at all until it admits a call again. `put` copies contents and returns how many will be written behind
    the caller's back; what the queue has no room for is refused. What is dropped counts as gone at once, and is dropped
    again after writes under way, and after failures, until it is. `missed` remembers what was not taken, or not written
    in the end. `name` is for the log and the threads.
    """

    def __init__(
        self,
        store: Store,
        timeout_s: float,
        limits: Limits = _USUAL,
        *,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "store",
        missed: MissedKeys | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ArgumentError(f"timeout_s is {timeout_s}, but must be above 0")
        self.store, self.timeout_s, self.limits, self.name = store, timeout_s, limits, name
        self.breaker = breaker or CircuitBreaker(clock=clock)
        self.last_error: Exception | None = None
        self.missed = MissedKeys() if missed is None else missed
        self._is_failing = False  # the last write did
        self._clock = clock
        self._speed = Speed(clock=clock)
        self._counts = Counts()
        self._held = StoreStats()
        self._is_closed = False
        self._workers = Workers(limits.num_threads, f"kvist {name}")
        self._queue = WriteQueue(
            self._write,
            self._drop,
            max_bytes=limits.max_queued_bytes,
            lot_bytes=limits.lot_bytes,
            lot_entries=limits.lot_entries,
            retry_s=limits.retry_s,
            name=f"kvist {name} writer",
            missed=self.missed.add,
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is likely there, as far as the store says so in time."""
        found = self._ask(lambda _: self._look(keys)) if keys else []
        if found is None:
            return [False] * len(keys)
        return [is_there and not self._queue.is_dropped(key) for key, is_there in zip(keys, found, strict=True)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers of what comes in time, whole and as it was put, and say which."""
        fetched = self.fetch(keys, [buffer.nbytes for buffer in buffers])
        for buffer, contents in zip(buffers, fetched, strict=True):
            if contents is not None:
                buffer[:] = contents
        return [contents is not None for contents in fetched]

    def fetch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[memoryview | None]:
        """Return what comes in time, whole and as it was put, in memory that is the caller's from then on."""
        arrived: list[_Arrival] = []
        if keys:
            self._ask(lambda call: self._read(call, keys, sizes, arrived))
        fetched: list[memoryview | None] = [None] * len(keys)
        for arrival in tuple(arrived):  # a late call may still add to it
            for at, contents in arrival:
                if not self._queue.is_dropped(keys[at]):
                    fetched[at] = contents
        self._counts.add_found([contents is not None for contents in fetched])
        return fetched

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Copy leading entries as far as there is room, to be written soon, and return how many; this never waits."""
        keys = [key for key, _ in entries]
        if self.breaker.is_open:
            self._counts.add(num_refused=len(entries))
            self.missed.add(keys)
            return 0
        self.missed.discard(keys)
        return self._queue.offer(entries)

    @property
    def may_refill(self) -> bool:
        """Whether there is something that was not taken and might be now."""
        return len(self.missed) > 0 and not self.breaker.is_open

    def take_missed(self, keys: Sequence[bytes], entry_bytes: int) -> tuple[list[int], bool]:
        """Return the indexes of leading keys of one namespace to `refill` now, and whether nothing else is missed.

        They are remembered no more. There are as many as the queue has room for; after a write that failed, one alone
        until another has succeeded.
        """
        if not self.may_refill or not keys or self._queue.is_dropped(keys[0]):
            return [], not keys or not self.missed
        num_waiting = self._queue.num_bytes
        limit = (self.limits.max_queued_bytes - num_waiting) // max(entry_bytes, 1)
        if self._is_failing:
            limit = min(limit, 0 if num_waiting else 1)
        return self.missed.take(keys, limit)

    def refill(self, entries: Sequence[tuple[bytes, memoryview]]) -> None:
        """Put what was missed, as `put` does; what is not taken or written this time is remembered again."""
        self._counts.add(num_refilled=self.put(entries))

    def drop(self, tag: bytes) -> None:
        """Forget all contents of a namespace; an empty tag: everything.

        They count as gone from now on, and the store is asked until it has forgotten them.
        """
        self.missed.drop(tag)
        self._queue.drop(tag, self.timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written or given up, and return whether it is so within the time."""
        return self._queue.flush(timeout_s)

    def seconds_to_get(self, num_bytes: int, num_entries: int) -> float:
        """Return how long a `get` of so much will take, by what was measured; infinite if the store is not asked."""
        if self.breaker.is_open:
            return inf
        limits = self.limits
        num_calls = max(1, ceil(num_bytes / limits.lot_bytes), ceil(num_entries / limits.lot_entries))
        return self._speed.seconds(num_bytes, num_calls)

    def stats(self) -> StoreStats:
        """Return what the store last said it holds, and what was done, as callers of the guard saw it."""
        with suppress(Exception):
            told: object = self._workers.call(lambda _: self.store.stats(), self.timeout_s)
            self._held = told if isinstance(told, StoreStats) else self._held
        own, held = self._counts.stats(), self._held
        return replace(
            held,
            num_hits=own.num_hits,
            num_misses=own.num_misses,
            num_refused=held.num_refused + own.num_refused + self._queue.num_refused,
            num_errors=own.num_errors,
            num_timeouts=own.num_timeouts,
            num_calls=own.num_calls,
            num_refilled=own.num_refilled,
            seconds=own.seconds,
        )

    def close(self) -> None:
        """Write what still waits and close the store, for at most `timeout_s` each; closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.flush(self.timeout_s)
        self._queue.stop()
        self.stats()
        self._workers.stop()
        closing = Thread(target=self._close_store, name=f"kvist {self.name} closing", daemon=True)
        closing.start()
        closing.join(self.timeout_s)

    def _close_store(self) -> None:
        try:
            self.store.close()
        except Exception as error:
            self._fail("could not be closed", error)

    def _look(self, keys: Sequence[bytes]) -> list[bool]:
        began = self._clock()
        found = _answers(self.store.contains(keys), len(keys))
        self._speed.note(0, self._clock() - began)
        return found

    def _read(self, call: Call[None], keys: Sequence[bytes], sizes: Sequence[int], arrived: list[_Arrival]) -> None:
        """Read lot after lot into buffers of our own, as long as somebody waits for it."""
        for lot in self._lots(sizes):
            if not call.is_wanted:
                return
            buffers = [np.empty(sizes[at], np.uint8).data for at in lot]
            began = self._clock()
            found = _answers(self.store.get([keys[at] for at in lot], buffers), len(lot))
            arrival = [(at, buffer) for at, buffer, is_there in zip(lot, buffers, found, strict=True) if is_there]
            self._speed.note(sum(buffer.nbytes for _, buffer in arrival), self._clock() - began)
            arrived.append(arrival)

    def _lots(self, sizes: Sequence[int]) -> Iterator[range]:
        """Cut entries into lots within the limits; yields ranges of their indexes."""
        begin = num_bytes = 0
        for at, size in enumerate(sizes):
            is_full = at - begin == self.limits.lot_entries or num_bytes + size > self.limits.lot_bytes
            if is_full and at > begin:
                yield range(begin, at)
                begin, num_bytes = at, 0
            num_bytes += size
        yield range(begin, len(sizes))

    def _drop(self, tag: bytes) -> bool:
        def drop(_: Call[bool]) -> bool:
            self.store.drop(tag)
            return True

        return self._ask(drop) is True

    def _write(self, entries: Entries, ended: Callable[[], None]) -> bool:
        def put(_: Call[int]) -> int:
            try:
                return self.store.put(entries)
            finally:
                ended()

        is_written = False
        try:
            is_written = self._ask(put, or_else=ended) is not None
        except ArgumentError as error:
            self.last_error = error
            self._counts.add(num_errors=1)
        self._is_failing = not is_written
        return is_written

    def _ask(self, act: Callable[[Call[T]], T], or_else: Callable[[], None] = lambda: None) -> T | None:
        """Return what `act` returns if the breaker admits it and it ends in time, else None.

        `or_else` is called if it was never begun. What is wrong with arguments is the caller's fault, and raised.
        """
        if not self.breaker.admits():
            or_else()
            return None
        began = self._clock()
        try:
            answer = self._workers.call(act, self.timeout_s)
        except ArgumentError:
            self.breaker.note_success()
            raise
        except Busy:
            or_else()
            self._fail("has not answered earlier calls yet", TimeoutError())
        except Late:
            self._fail(f"has not answered within {self.timeout_s} s", TimeoutError())
        except Exception as error:
            self._fail("failed", error)
        else:
            self.breaker.note_success()
            return answer
        finally:
            self._counts.add_call(self._clock() - began)
        return None

    def _fail(self, told: str, error: Exception) -> None:
        self.last_error = error
        if isinstance(error, TimeoutError):
            self._counts.add(num_timeouts=1)
        else:
            self._counts.add(num_errors=1)
        if self.breaker.note_failure():
            _log.warning(
                "%s %s (%s), and is not asked for some time", self.name, told, str(error) or type(error).__name__
            )


def _answers(found: Sequence[bool], num_asked: int) -> list[bool]:
    """Return what a store says of each key; raises TypeError for what is no such answer, whose keys nobody can tell."""
    answers = list(found)
    if len(answers) != num_asked or not all(isinstance(each, bool | np.bool_) for each in answers):
        raise TypeError(f"{num_asked} keys were asked for, the answer is {found!r:.80}")
    return answers
