"""Who does what while events are gathered, as state machines that never wait: followers tell, rank 0 collects.

A follower tells rank 0 what it has once a period, though it be nothing, and tells no more until that is answered. So no
rank can swamp another, and whoever is silent for too long is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from threading import Condition
from typing import Protocol

from kvist.errors import KvistError, TransferError
from kvist.wire.gather_messages import Kind, Message

__all__ = ["EventQueue", "Follower", "Leader", "Transport"]

MAX_MESSAGE_BYTES = 2**24
"""More events than this go in several messages; one event may be larger."""


class Transport(Protocol):
    """Moves bytes between the ranks of a job. All of its calls but `all_gather` and `close` return at once.

    `unfit_for_threads` says why no other thread than the caller's may use it; empty if one may.
    """

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def unfit_for_threads(self) -> str:
        """Why no other thread may use it, or nothing."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that another look would bring on."""

    def send(self, rank: int, message: bytes) -> None:
        """Begin to send; messages to one rank arrive in order."""

    def receive(self) -> tuple[int, bytes] | None:
        """Return a message that has arrived and the rank that it is from, or None."""

    def all_gather(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Return what each rank gives to the same call, by rank; raises TransferError after the time."""

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Finish what was begun, at most so long; after a failure, let go of it."""


class EventQueue:
    """Encoded events with the rank that each is from: at most `max_events`, the oldest go first.

    `num_lost` counts those that went, by rank. Any thread may use it.
    """

    def __init__(self, max_events: int) -> None:
        self.max_events = max_events
        self.num_lost: Counter[int] = Counter()
        self.is_closed = False
        self._events: deque[tuple[int, bytes]] = deque()
        self._condition = Condition()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, rank: int, events: Iterable[bytes]) -> None:
        """Add events of a rank; once the queue is closed they are lost."""
        new = [(rank, event) for event in events]
        with self._condition:
            if self.is_closed:
                self.num_lost[rank] += len(new)
                return
            self._events.extend(new)
            while len(self._events) > self.max_events:
                self.num_lost[self._events.popleft()[0]] += 1
            self._condition.notify_all()

    def take(self, max_bytes: int | None = None) -> list[tuple[int, bytes]]:
        """Take the oldest events: all, or at least one and as many as so many bytes hold."""
        with self._condition:
            if max_bytes is None:
                taken = list(self._events)
                self._events.clear()
                return taken
            taken, size = [], 0
            while self._events and (not taken or size + len(self._events[0][1]) <= max_bytes):
                taken.append(self._events.popleft())
                size += len(taken[-1][1])
            return taken

    def close(self) -> None:
        """Take no more events, and wake who waits."""
        with self._condition:
            self.is_closed = True
            self._condition.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there are events or the queue is closed, at most so long."""
        with self._condition:
            self._condition.wait_for(lambda: self._events or self.is_closed, timeout_s)


class Follower:
    """A rank other than 0: tells what is in its queue."""

    def __init__(self, transport: Transport, queue: EventQueue, period_s: float, timeout_s: float, now: float) -> None:
        self._transport, self._queue = transport, queue
        self._period_s, self._timeout_s = period_s, timeout_s
        self._next_at = now + period_s
        self._told_at: float | None = None
        self._is_finishing = False
        self.is_done = False

    def finish(self) -> None:
        """Begin to stop: tell what is left, and no more."""
        self._is_finishing = True
        self._queue.close()

    def advance(self, now: float) -> None:
        """Do what can be done now. Raises TransferError if rank 0 is gone, or says that another is."""
        while (arrived := self._transport.receive()) is not None:
            self._take(Message.unpack(arrived[1]))
        if self.is_done:
            return
        if self._told_at is None:
            if self._is_finishing or now >= self._next_at:
                self._tell(now)
        elif now - self._told_at > self._timeout_s:
            silence_s = now - self._told_at
            raise TransferError(f"rank 0 has not answered for {silence_s:.1f} s, the limit is {self._timeout_s:g} s")

    def _take(self, answer: Message) -> None:
        self._told_at = None
        if answer.kind is Kind.FAILED:
            raise TransferError(f"rank 0 has ended the gathering: {answer.events[0].decode()}")
        if answer.kind is Kind.FINISH:
            self.finish()
        self.is_done = answer.kind is Kind.DONE

    def _tell(self, now: float) -> None:
        # Whether it is closed is asked before it is emptied: what comes in between is told next time.
        is_closed = self._queue.is_closed
        events = [event for _, event in self._queue.take(MAX_MESSAGE_BYTES)]
        has_more = bool(len(self._queue))
        kind = Kind.LAST if is_closed and not has_more else Kind.EVENTS
        message = Message(kind, events, self._queue.num_lost[self._transport.rank])
        self._told_at, self._next_at = now, now if has_more else now + self._period_s
        self._transport.send(0, message.pack())


class Leader:
    """Rank 0: puts what the others tell into its queue. `num_lost_there` counts what they lost before, by rank."""

    def __init__(self, transport: Transport | None, queue: EventQueue, timeout_s: float, now: float) -> None:
        self._transport, self._queue, self._timeout_s = transport, queue, timeout_s
        self._heard_at = dict.fromkeys(range(1, transport.size if transport else 1), now)
        self._is_finishing = False
        self.num_lost_there: Counter[int] = Counter()

    @property
    def is_done(self) -> bool:
        """Whether all ranks have told their last."""
        return self._is_finishing and not self._heard_at

    def finish(self) -> None:
        """Begin to stop: ask the others for their last."""
        self._is_finishing = True

    def advance(self, now: float) -> None:
        """Do what can be done now. Raises TransferError if a rank is gone, after the others have been told."""
        if self._transport is None:
            return
        try:
            while (arrived := self._transport.receive()) is not None:
                self._take(self._transport, *arrived, now)
            self._require_life(now)
        except KvistError as error:
            self._tell_failure(self._transport, str(error))
            raise

    def _require_life(self, now: float) -> None:
        for rank, heard_at in self._heard_at.items():
            if now - heard_at > self._timeout_s:
                silence_s = now - heard_at
                limit = f"the limit is {self._timeout_s:g} s"
                raise TransferError(f"rank {rank} has not been heard for {silence_s:.1f} s, {limit}")

    def _tell_failure(self, transport: Transport, text: str) -> None:
        """Tell all that have not finished why the gathering ends, as far as they can be reached."""
        for rank in self._heard_at:
            with suppress(Exception):
                transport.send(rank, Message(Kind.FAILED, [text.encode()]).pack())

    def _take(self, transport: Transport, rank: int, packed: bytes, now: float) -> None:
        message = Message.unpack(packed)
        self._heard_at[rank] = now
        self._queue.add(rank, message.events)
        self.num_lost_there[rank] = message.num_lost
        if message.kind is Kind.LAST:
            del self._heard_at[rank]
            self.finish()
            answer = Kind.DONE
        else:
            answer = Kind.FINISH if self._is_finishing else Kind.GO_ON
        transport.send(rank, Message(answer).pack())
