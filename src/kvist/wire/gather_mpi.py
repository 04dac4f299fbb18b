"""Ranks of an MPI job, through `mpi4py`.

Everything is sent and received without blocking and looked at again, since no call of MPI takes a time limit. What is
needed of MPI's threads: a `Gather` with a thread of its own calls MPI at any time, so MPI must have been initialised
with MPI_THREAD_MULTIPLE; or with MPI_THREAD_SERIALIZED, if all that call MPI in this process hold one `lock` while they
do. With less, or without that lock, `Gather(..., threaded=False)` calls MPI only from the caller's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvist.errors import TransferError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport"]

LOOK_S = 0.0005
"""How long to wait between two looks at what is under way."""


class MpiTransport:
    """The ranks of a communicator; all of them make one at the same time, since it duplicates the communicator.

    `lock` is held during each call of MPI: see the module. After a rank is gone, MPI_Finalize may never return: leave
    with `comm.Abort()`. `mpirun` ends all ranks by itself when one dies, unless it is told not to.
    """

    def __init__(self, comm: MPI.Intracomm, *, lock: AbstractContextManager[Any] | None = None) -> None:
        from mpi4py import MPI

        self._mpi, self._has_lock = MPI, lock is not None
        self._lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._incoming: list[tuple[MPI.Request, int, bytearray]] = []

    @property
    def unfit_for_threads(self) -> str:
        """Why no other thread may use it, or nothing."""
        level = self._mpi.Query_thread()
        if level == self._mpi.THREAD_MULTIPLE or (level == self._mpi.THREAD_SERIALIZED and self._has_lock):
            return ""
        names = ("SINGLE", "FUNNELED", "SERIALIZED")
        levels = (self._mpi.THREAD_SINGLE, self._mpi.THREAD_FUNNELED, self._mpi.THREAD_SERIALIZED)
        name = names[levels.index(level)]
        return f"MPI has MPI_THREAD_{name}, a thread needs MPI_THREAD_MULTIPLE, or SERIALIZED and a lock"

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that another look would bring on."""
        return bool(self._sends or self._incoming)

    def send(self, rank: int, message: bytes) -> None:
        """Begin to send; messages to one rank arrive in order."""
        with self._lock:
            self._forget_sent()
            self._sends.append((self._comm.Isend([message, self._mpi.BYTE], rank), message))

    def receive(self) -> tuple[int, bytes] | None:
        """Return a message that has arrived and the rank that it is from, or None."""
        with self._lock:
            self._forget_sent()
            status = self._mpi.Status()
            while (found := self._comm.Improbe(status=status)) is not None:
                buffer = bytearray(status.Get_count(self._mpi.BYTE))
                request = found.Irecv([buffer, self._mpi.BYTE])
                self._incoming.append((request, status.Get_source(), buffer))
            # Messages of one rank are matched in order, and must be handed over in order.
            waiting: set[int] = set()
            for index, (request, rank, buffer) in enumerate(self._incoming):
                if rank not in waiting and request.Test():
                    del self._incoming[index]
                    return rank, bytes(buffer)
                waiting.add(rank)
        return None

    def all_gather(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Return what each rank gives to the same call, by rank; raises TransferError after the time."""
        until = time.monotonic() + timeout_s
        own, sizes = bytearray(len(message).to_bytes(8, "little")), bytearray(8 * self.size)
        self._complete(lambda: self._comm.Iallgather([own, self._mpi.BYTE], [sizes, self._mpi.BYTE]), until, timeout_s)
        counts = [int.from_bytes(sizes[at : at + 8], "little") for at in range(0, len(sizes), 8)]
        everything = bytearray(sum(counts))
        self._complete(
            lambda: self._comm.Iallgatherv([message, self._mpi.BYTE], [everything, counts, None, self._mpi.BYTE]),
            until,
            timeout_s,
        )
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [bytes(everything[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Finish what was begun, at most so long; after a failure, let go of it."""
        until = time.monotonic() + (0 if failed else timeout_s)
        while True:
            with self._lock:
                self._forget_sent()
            if not self._sends or time.monotonic() >= until:
                break
            time.sleep(LOOK_S)
        with self._lock:
            for request, _, _ in self._incoming:
                request.Cancel()

    def _complete(self, begin: Callable[[], MPI.Request], until: float, timeout_s: float) -> None:
        with self._lock:
            request = begin()
        while True:
            with self._lock:
                is_complete = request.Test()
            if is_complete:
                return
            if time.monotonic() >= until:
                raise TransferError(f"rank {self.rank} waited {timeout_s:g} s for the others")
            time.sleep(LOOK_S)

    def _forget_sent(self) -> None:
        self._sends = [(request, message) for request, message in self._sends if not request.Test()]
