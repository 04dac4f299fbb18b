"""Events of all ranks of a job, gathered on rank 0: each with its rank, in order, within bounds and time limits.

Over MPI with `kvist.wire.gather_mpi.MpiTransport`, over `torch.distributed` with
`kvist.wire.gather_torch.TorchTransport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self

from kvist.errors import ArgumentError, KvistError, SequenceError, TransferError
from kvist.wire.gather_roles import EventQueue, Follower, Leader, Transport

__all__ = ["Gather", "Transport"]

MIN_PAUSE_S, MAX_PAUSE_S, LOOKS_PER_PERIOD = 0.001, 0.05, 8


class Gather:
    """Brings encoded events of all ranks to rank 0, once every `period_s` seconds.

    Every rank of the job makes one. A rank keeps at most `max_events` that are not gathered yet, rank 0 that many for
    each rank; beyond that the oldest are lost, and counted. When one rank closes, all stop: what they have offered by
    then still arrives. A rank that is not heard for `timeout_s`, or is not answered, ends the gathering on all others
    within twice that time, with a TransferError that names it.

    A thread of its own does this, so that `offer` never waits. With `threaded=False` there is none, and the caller's
    calls of `advance`, at least once in `timeout_s`, do it: for an MPI that must be called by one thread only.

    >>> gather = Gather(None, max_events=2)  # a job of one rank needs no transport
    >>> gather.offer([b"stored", b"moved", b"removed"])
    >>> gather.poll(), gather.num_lost
    ([(0, b'moved'), (0, b'removed')], {0: 1})
    >>> gather.close()
    """

    def __init__(
        self,
        transport: Transport | None,
        period_s: float = 0.05,
        max_events: int = 65536,
        rank: int | None = None,
        size: int | None = None,
        *,
        timeout_s: float = 10.0,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.size = _place(transport, rank, size)
        _check_numbers(period_s, max_events, timeout_s)
        if threaded and transport is not None and transport.unfit_for_threads:
            raise ArgumentError(f"threaded: {transport.unfit_for_threads}; pass threaded=False and call advance()")
        self.error: KvistError | None = None
        self._transport, self._timeout_s, self._clock = transport, timeout_s, clock
        self._pause_s = min(max(period_s / LOOKS_PER_PERIOD, MIN_PAUSE_S), MAX_PAUSE_S)
        self._queue = EventQueue(max_events if self.rank else max_events * self.size)
        self._leader: Leader | None = None
        self._role: Leader | Follower
        if self.rank and transport is not None:
            self._role = Follower(transport, self._queue, period_s, timeout_s, clock())
        else:
            self._role = self._leader = Leader(transport, self._queue, timeout_s, clock())
        self._lock, self._wake, self._is_closed = Lock(), Event(), False
        self._thread: Thread | None = None
        if threaded and transport is not None:
            self._thread = Thread(target=self._run, name="kvist-gather", daemon=True)
            self._thread.start()

    # -- events -------------------------------------------------------------------------------------------------------

    def offer(self, events: Iterable[bytes]) -> None:
        """Add events of this rank; never waits. What is offered after a stop is counted as lost.

        Raises TransferError once the gathering has failed.
        """
        self._raise_failure()
        self._queue.add(self.rank, events)

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[int, bytes]]:
        """Take what has been gathered, each event with its rank: those of one rank are in the order of their offers.

        Waits for some, at most `timeout_s` (None: without end), and no longer than until all ranks have stopped. Only
        for rank 0. Raises TransferError once the gathering has failed and all that came before is taken.
        """
        if self._leader is None:
            raise SequenceError(f"poll: events are gathered on rank 0, this is rank {self.rank}")
        if self._thread is not None or self._transport is None:
            self._queue.wait(timeout_s)
        else:
            until = None if timeout_s is None else self._clock() + timeout_s
            self._advance_until(lambda: bool(len(self._queue)), until)
        events = self._queue.take()
        if not events:
            self._raise_failure()
        return events

    @property
    def num_lost(self) -> Mapping[int, int]:
        """How many events were lost, by the rank that they are from; on other ranks than 0 only those lost here."""
        there = self._leader.num_lost_there if self._leader else {}
        ranks = sorted({*self._queue.num_lost, *there})
        counts = {rank: self._queue.num_lost[rank] + there.get(rank, 0) for rank in ranks}
        return {rank: count for rank, count in counts.items() if count}

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is gathered any more: a rank has closed, or the gathering has failed."""
        return self.error is not None or self._role.is_done

    # -- going on -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what can be done now, without waiting. Needed only with `threaded=False`.

        Raises TransferError once the gathering has failed.
        """
        with self._lock:
            self._raise_failure()
            if not self._role.is_done:
                try:
                    self._role.advance(self._clock())
                except Exception as error:
                    self._fail(error)
                    self._raise_failure()
                if self._role.is_done:
                    self._queue.close()

    def close(self) -> None:
        """Stop all ranks, after what was offered has been gathered; waits for that at most twice `timeout_s`.

        On rank 0 `poll` still returns what has come. Raises TransferError if the gathering has failed; a second time
        does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.error is None:
            with self._lock:
                self._role.finish()
            self._wake.set()
            self._wait_until_done(self._timeout_s)
        self._queue.close()
        if self._transport is not None:
            self._transport.close(self._timeout_s, failed=self.error is not None)
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_done(self, timeout_s: float) -> None:
        if self._transport is None:
            return
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self._advance_until(lambda: False, self._clock() + timeout_s)
        if not self.is_stopped:
            self._fail(TransferError(f"rank {self.rank} waited {timeout_s:g} s for the others to stop"))

    def _advance_until(self, is_enough: Callable[[], bool], until: float | None) -> None:
        """Advance until that is so, all is done, it fails, or some time has come."""
        while not self.is_stopped:
            try:
                self.advance()
            except KvistError:
                return
            if is_enough() or (until is not None and self._clock() >= until):
                return
            self._pause()

    def _run(self) -> None:
        while not self.is_stopped:
            try:
                self.advance()
            except KvistError:
                return
            if not self.is_stopped:
                self._pause()

    def _pause(self) -> None:
        is_busy = self._transport is not None and self._transport.is_busy
        self._wake.wait(MIN_PAUSE_S if is_busy else self._pause_s)
        self._wake.clear()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, KvistError):
            cause, error = error, TransferError(f"rank {self.rank} cannot gather events: {error!r}")
            error.__cause__ = cause
        self.error = error
        self._queue.close()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise TransferError(str(self.error)) from self.error


def _place(transport: Transport | None, rank: int | None, size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks, which must be told both or neither."""
    if (rank is None) != (size is None):
        raise ArgumentError(f"rank is {rank}, size is {size}: give both, or neither")
    if rank is None or size is None:
        return (0, 1) if transport is None else (transport.rank, transport.size)
    for name, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            raise ArgumentError(f"{name} is {value!r}, must be an int")
    if not 0 <= rank < size:
        raise ArgumentError(f"rank is {rank}, must be from 0 to size - 1 = {size - 1}")
    if (rank, size) != ((0, 1) if transport is None else (transport.rank, transport.size)):
        told = (
            "there is no transport" if transport is None else f"the transport is {transport.rank} of {transport.size}"
        )
        raise ArgumentError(f"rank is {rank} of {size}, but {told}")
    return rank, size


def _check_numbers(period_s: Any, max_events: Any, timeout_s: Any) -> None:
    if type(max_events) is not int or max_events < 1:
        raise ArgumentError(f"max_events is {max_events!r}, must be an int above 0")
    for name, value in (("period_s", period_s), ("timeout_s", timeout_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
            raise ArgumentError(f"{name} is {value!r}, must be a number of seconds above 0")
    if timeout_s < 2 * period_s:
        raise ArgumentError(f"timeout_s is {timeout_s}, must be at least two periods of {period_s} s")
