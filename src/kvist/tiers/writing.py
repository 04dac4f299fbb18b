"""What is still to be done at a store behind its callers' backs: contents to be written, namespaces to be dropped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from kvist.tiers.protocol import NAMESPACE_TAG_BYTES

__all__ = ["Entries", "WriteQueue"]

Entries = Sequence[tuple[bytes, memoryview]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    key: bytes
    contents: bytes
    offer: int
    """Which call it came with: what follows a block in its prefix is of no use without it."""


class WriteQueue:
    """A bounded queue, and a thread that is begun when something is in it, and that no interpreter waits for.

    `write` takes entries and a callable, and returns whether they were written; the callable is to be called when the
    store has let go of them, be it later. `drop` takes a tag and returns whether the store has forgotten it. Both end
    in bounded time. Of an offer of which a part was not written, the rest is not either. `missed` is told the keys that
    were not taken or not written; it must not call the queue.
    """

    def __init__(
        self,
        write: Callable[[Entries, Callable[[], None]], bool],
        drop: Callable[[bytes], bool],
        *,
        max_bytes: int,
        lot_bytes: int,
        lot_entries: int,
        retry_s: float,
        name: str,
        missed: Callable[[Iterable[bytes]], None] = lambda _: None,
    ) -> None:
        self._write, self._drop, self._missed = write, drop, missed
        self._max_bytes, self._lot_bytes, self._lot_entries, self._retry_s = max_bytes, lot_bytes, lot_entries, retry_s
        self._waiting: deque[_Waiting] = deque()
        self._num_bytes = self._num_offers = self._num_refused = 0
        self._under_way: list[list[_Waiting]] = []
        self._dropping: dict[bytes, float] = {}  # when to try again; 0 before the first try
        self._is_writing = self._is_stopped = False
        self._name = name
        self._thread: Thread | None = None
        self._changed = Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes of contents that wait or are being written."""
        with self._changed:
            return self._num_bytes

    @property
    def num_refused(self) -> int:
        """Entries that were not taken, or not written in the end."""
        with self._changed:
            return self._num_refused

    def offer(self, entries: Entries) -> int:
        """Copy leading entries as far as there is room, and return how many; the rest is refused."""
        with self._changed:
            self._num_offers += 1
            num_taken = 0
            for key, contents in entries:
                if self._is_stopped or self._is_dropped(key) or self._num_bytes + contents.nbytes > self._max_bytes:
                    break
                self._waiting.append(_Waiting(key, bytes(contents), self._num_offers))
                self._num_bytes += contents.nbytes
                num_taken += 1
            self._refuse([key for key, _ in entries[num_taken:]])
            self._wake()
            return num_taken

    def drop(self, tag: bytes, timeout_s: float) -> bool:
        """Have a namespace forgotten, also what waits to be written; return whether that was done at once.

        This waits for the first try, within the time limit; there will be more until it is done.
        """
        with self._changed:
            if self._is_stopped:
                return False
            self._remove(lambda each: each.key.startswith(tag))
            self._dropping[tag] = 0.0
            self._wake()
            self._changed.wait_for(lambda: self._dropping.get(tag) != 0.0, timeout_s)
            return tag not in self._dropping

    def is_dropped(self, key: bytes) -> bool:
        """Whether the namespace of a key is still to be forgotten, so that what the store says of it does not count."""
        return bool(self._dropping) and self._is_dropped(key)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits any more, and return whether it is so within the time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def stop(self) -> None:
        """Take nothing more; what still waits is not written."""
        with self._changed:
            self._is_stopped = True
            self._num_refused += len(self._remove(lambda _: True))

    def _refuse(self, keys: list[bytes]) -> None:
        if keys:
            self._num_refused += len(keys)
            self._missed(keys)

    def _is_idle(self) -> bool:
        return not (self._waiting or self._is_writing or self._dropping)

    def _is_dropped(self, key: bytes) -> bool:
        return b"" in self._dropping or key[:NAMESPACE_TAG_BYTES] in self._dropping

    def _remove(self, is_unwanted: Callable[[_Waiting], bool]) -> list[_Waiting]:
        removed = [each for each in self._waiting if is_unwanted(each)]
        self._waiting = deque(each for each in self._waiting if not is_unwanted(each))
        self._num_bytes -= sum(len(each.contents) for each in removed)
        self._changed.notify_all()
        return removed

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while self._has_worked():
            pass

    def _has_worked(self) -> bool:
        with self._changed:
            while (job := self._next()) is None and not self._is_stopped:
                self._changed.wait(self._retry_s if self._dropping else None)
            self._is_writing = isinstance(job, list)
        if job is None:
            return False
        if isinstance(job, list):
            self._write_lot(job)
        else:
            self._try_drop(job)
        return True

    def _next(self) -> bytes | list[_Waiting] | None:
        """Return a tag to drop, a lot to write, or None; drops wait for writes of their namespace under way."""
        for tag, not_before in self._dropping.items():
            if time.monotonic() >= not_before and not self._is_under_way(tag):
                return tag
        return self._lot() if self._waiting else None

    def _is_under_way(self, tag: bytes) -> bool:
        return any(each.key.startswith(tag) for lot in self._under_way for each in lot)

    def _lot(self) -> list[_Waiting]:
        lot = [self._waiting.popleft()]
        num_bytes = len(lot[0].contents)
        while self._waiting and len(lot) < self._lot_entries:
            num_bytes += len(self._waiting[0].contents)
            if num_bytes > self._lot_bytes:
                break
            lot.append(self._waiting.popleft())
        self._under_way.append(lot)
        return lot

    def _write_lot(self, lot: list[_Waiting]) -> None:
        entries = [(each.key, memoryview(each.contents)) for each in lot]
        is_written = self._write(entries, lambda: self._ended(lot))
        with self._changed:
            if not is_written:
                self._refuse([each.key for each in [*lot, *self._remove(lambda each: each.offer == lot[-1].offer)]])
            self._is_writing = False
            self._changed.notify_all()

    def _ended(self, lot: list[_Waiting]) -> None:
        """Let go of a lot; until then, be it late, it takes room."""
        with self._changed:
            self._under_way.remove(lot)
            self._num_bytes -= sum(len(each.contents) for each in lot)
            self._changed.notify_all()

    def _try_drop(self, tag: bytes) -> None:
        is_dropped = self._drop(tag)
        with self._changed:
            if is_dropped:
                self._dropping.pop(tag, None)
            elif tag in self._dropping:
                self._dropping[tag] = time.monotonic() + self._retry_s
            self._changed.notify_all()
