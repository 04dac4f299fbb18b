"""A tensor that stays where it is, brought up to date in pieces through pinned memory, so that the host never waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Mirror", "StagingBuffers", "runs_of"]


class _Event(Protocol):
    def query(self) -> bool: ...


def runs_of(numbers: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where runs of consecutive numbers, in ascending order, begin and end, `[n, 2]`.

    >>> runs_of(np.array([0, 1, 3])).tolist()
    [[0, 2], [3, 4]]
    """
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(numbers) - 1)
    runs = np.stack([numbers[firsts], numbers[lasts] + 1], axis=1) if len(numbers) else np.empty((0, 2))
    return runs.astype(np.int64)


@dataclass(slots=True)
class _Staged:
    buffer: Tensor
    copied: _Event | None = None


class StagingBuffers:
    """Buffers from which copies run: one is used again when the event behind its last copies has passed.

    Where none has, there is one more. So nobody waits, and there are as many as uploads were ever under way at once.
    """

    def __init__(self, allocate: Callable[[], Tensor]) -> None:
        self._allocate = allocate
        self._buffers: list[_Staged] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self) -> Tensor:
        """Return a buffer that no copy reads from."""
        for at, staged in enumerate(self._buffers):
            if staged.copied is None or staged.copied.query():
                self._buffers.append(self._buffers.pop(at))
                break
        else:
            self._buffers.append(_Staged(self._allocate()))
        return self._buffers[-1].buffer

    def give(self, copied: _Event) -> None:
        """Note the event behind the copies from the buffer taken last."""
        self._buffers[-1].copied = copied


class Mirror:
    """An int32 tensor on a device, -1 at first, at one address for life; `write` brings pieces of an array over."""

    def __init__(self, shape: tuple[int, ...], device: str | torch.device) -> None:
        with torch.inference_mode(mode=False):
            self.tensor = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._flat = self.tensor.view(-1)
        self._staging = StagingBuffers(lambda: torch.empty(self._flat.shape, dtype=torch.int32, pin_memory=True))

    def write(self, source: NDArray[np.int32], runs: NDArray[np.int64]) -> None:
        """Copy `runs` of `source`, an array of the tensor's size, in the order of the current stream."""
        flat = torch.from_numpy(source.reshape(-1))
        if self.tensor.device.type != "cuda":
            self._copy(flat, runs)
            return
        staged = self._staging.take()
        for start, stop in runs.tolist():
            staged[start:stop].copy_(flat[start:stop])
        stream = torch.cuda.current_stream(self.tensor.device)
        self._copy(staged, runs)
        self._staging.give(stream.record_event())

    def _copy(self, source: Tensor, runs: NDArray[np.int64]) -> None:
        for start, stop in runs.tolist():
            self._flat[start:stop].copy_(source[start:stop], non_blocking=True)
