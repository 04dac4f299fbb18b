"""Ranks of a `torch.distributed` job, through a process group of their own over gloo."""

from __future__ import annotations

import re
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from kvist.errors import TransferError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TorchTransport"]

SIZE_TAG, MESSAGE_TAG = 71, 72
END = -1
"""The size that says that a rank sends no more."""
MAX_RECEIVED_BYTES = 2**30
"""What is announced as more is no message: memory for it is not even asked for."""


class TorchTransport:
    """The ranks of the default process group, or of `ranks`: all of them make one, at the same time.

    `timeout_s` ends every wait for a message: give more than the time limit of a `Gather` over it. Ranks wait for one
    another for `connect_timeout_s` when they make it. Gloo has no way to look whether a message has come, so threads
    wait for them, from the first `receive` on: one on each rank, on rank 0 one for each other. The job's own
    collectives are in other groups and do not meet with it.
    """

    unfit_for_threads = ""
    is_busy = False

    def __init__(
        self, timeout_s: float = 10.0, *, ranks: Sequence[int] | None = None, connect_timeout_s: float = 120.0
    ) -> None:
        if not dist.is_initialized():
            raise TransferError("torch.distributed is not initialised: call init_process_group first")
        self._timeout_s = timeout_s
        self._ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self._group: Any = dist.new_group(
            self._ranks, timeout=timedelta(seconds=max(connect_timeout_s, timeout_s)), backend="gloo"
        )
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._sent: dict[int, deque[tuple[Any, torch.Tensor]]] = {rank: deque() for rank in range(self.size)}
        self._errors: list[TransferError] = []
        self._threads: list[Thread] = []

    def send(self, rank: int, message: bytes) -> None:
        """Begin to send; messages to one rank arrive in order."""
        self._post(rank, len(message), message)

    def receive(self) -> tuple[int, bytes] | None:
        """Return a message that has arrived and the rank that it is from, or None.

        Raises TransferError after a connection has failed.
        """
        if not self._threads:
            self._threads = [
                Thread(target=self._listen, args=(rank,), name=f"kvist-gather-from-{rank}", daemon=True)
                for rank in self._peers()
            ]
            for thread in self._threads:
                thread.start()
        if self._arrived:
            return self._arrived.popleft()
        if self._errors:
            raise self._errors[0]
        return None

    def all_gather(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Return what each rank gives to the same call, by rank; raises TransferError after the time."""
        own = torch.tensor([len(message)])
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        until = time.monotonic() + timeout_s
        try:
            self._all_gather(sizes, own, until)
            width = max(int(size) for size in sizes)
            padded = _tensor(message.ljust(width, b"\0"))
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            if width:
                self._all_gather(parts, padded, until)
        except RuntimeError as error:
            raise TransferError(f"rank {self.rank} waited for the others, at most {timeout_s:g} s: {error}") from error
        return [part.numpy()[: int(size)].tobytes() for part, size in zip(parts, sizes, strict=True)]

    def close(self, timeout_s: float, *, failed: bool = False) -> None:
        """Tell the others that no more comes, and wait until they have, at most so long."""
        for rank in self._peers() if self._threads and not failed else ():
            with suppress(RuntimeError):  # it may have gone before us
                self._post(rank, END, b"")
        until = time.monotonic() + timeout_s
        for thread in self._threads if not failed else ():
            thread.join(max(until - time.monotonic(), 0))

    def _all_gather(self, parts: list[torch.Tensor], own: torch.Tensor, until: float) -> None:
        left_s = max(until - time.monotonic(), 0.001)
        work: Any = dist.all_gather(parts, own, group=self._group, async_op=True)
        work.wait(timedelta(seconds=left_s))

    def _peers(self) -> list[int]:
        return [0] if self.rank else list(range(1, self.size))

    def _post(self, rank: int, size: int, message: bytes) -> None:
        to, sent = self._ranks[rank], self._sent[rank]
        parts = [(torch.tensor([size]), SIZE_TAG)] + ([(_tensor(message), MESSAGE_TAG)] if message else [])
        for tensor, tag in parts:
            sent.append((dist.isend(tensor, to, group=self._group, tag=tag), tensor))
        while len(sent) > 4:  # gloo reads them until they are sent; of the latest two messages nothing is known yet
            sent.popleft()[0].wait()

    def _listen(self, rank: int) -> None:
        """Put into the box what a rank sends, until it says that it sends no more, or fails."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                self._wait_for(size, rank, SIZE_TAG)
                if size.item() == END:
                    return
                if not 0 <= size.item() <= MAX_RECEIVED_BYTES:
                    raise WireError(f"size: expected 0 to {MAX_RECEIVED_BYTES} bytes, got {size.item()}")
                message = torch.empty(int(size.item()), dtype=torch.uint8)
                if len(message):
                    self._wait_for(message, rank, MESSAGE_TAG)
                self._arrived.append((rank, message.numpy().tobytes()))
        except Exception as error:
            self._errors.append(TransferError(f"rank {rank} is gone: {_cause(error)}"))

    def _wait_for(self, part: torch.Tensor, rank: int, tag: int) -> None:
        """Fill a tensor with what a rank sends."""
        work: Any = dist.irecv(part, self._ranks[rank], group=self._group, tag=tag)
        work.wait(timedelta(seconds=self._timeout_s))


def _cause(error: Exception) -> str:
    """Return what gloo says has happened, without where in its source and what that may mean."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]


def _tensor(message: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(message, np.uint8).copy())
