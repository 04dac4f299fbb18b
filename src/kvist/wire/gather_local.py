"""Ranks that are threads or objects of one process: to try out in a test what will run as a job of many."""

from __future__ import annotations

from collections import deque
from threading import Barrier, BrokenBarrierError

from kvist.errors import TransferError

__all__ = ["LocalTransport", "local_transports"]


class LocalTransport:
    """One end of a job within a process; `is_cut` makes it deaf and dumb, as a rank that was killed is."""

    unfit_for_threads = ""
    is_busy = False

    def __init__(self, rank: int, boxes: list[deque[tuple[int, bytes]]], shared: list[bytes], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(boxes)
        self.is_cut = False
        self._boxes, self._shared, self._barrier = boxes, shared, barrier

    def send(self, rank: int, message: bytes) -> None:
        """Put a message into the box of a rank."""
        if not self.is_cut:
            self._boxes[rank].append((self.rank, message))

    def receive(self) -> tuple[int, bytes] | None:
        """Take the oldest message out of the own box."""
        return self._boxes[self.rank].popleft() if self._boxes[self.rank] and not self.is_cut else None

    def all_gather(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Return what each rank, in its own thread, gives to the same call; raises TransferError after the time."""
        try:
            self._shared[self.rank] = message
            self._barrier.wait(timeout_s)
            gathered = list(self._shared)
            self._barrier.wait(timeout_s)
        except BrokenBarrierError:
            raise TransferError(f"rank {self.rank} waited {timeout_s:g} s for the others") from None
        return gathered

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Do nothing: nothing is under way."""


def local_transports(size: int) -> list[LocalTransport]:
    """Return the ends of a job of so many ranks, by rank."""
    boxes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
    shared, barrier = [b""] * size, Barrier(size)
    return [LocalTransport(rank, boxes, shared, barrier) for rank in range(size)]
