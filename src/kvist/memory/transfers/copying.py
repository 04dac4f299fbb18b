"""Copies scattered blocks in the memory of this machine, on a few threads, in the way that suits the pieces' size.

Measured on two cores, as parts of one `memcpy` of the same bytes on one thread (`benchmarks/bench_transfer.py`):

| pieces of | a call for each piece, 2 threads | through a buffer, 2 threads | one thread |
|---|---|---|---|
| 4 KiB | 0.18 | 0.66 | 0.33 |
| 32 KiB | 0.59 | 0.79 | 0.50 |
| 128 KiB | 1.06 | 0.85 | 0.59 |
| 2 MiB | 1.17 | 0.81 | 0.62 |

One thread cannot do better than 0.62 with large pieces: a long `memcpy` bypasses the cache, a short one does not.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from functools import partial
from threading import local

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError
from kvist.memory.layout import BlockLayout
from kvist.memory.transfers.jobs import Ids, Job, Pair, columns_of, paired

__all__ = ["Copier"]

Bytes = NDArray[np.uint8]

LARGE_PIECE_BYTES = 64 << 10
"""From this size on, a call for each piece costs less than going through a buffer."""
BUFFER_BYTES = 1 << 20
"""So much fits the cache of a core beside what else is in use; less costs more calls."""
TASK_BYTES = 4 << 20
"""What a thread takes at once; threads that are slower take fewer."""
ALONE_BYTES = 1 << 20
"""Up to so much, waking another thread costs more than it helps."""

_Task = Callable[[Bytes], None]
"""A part of a copy, given a buffer of `BUFFER_BYTES`, or more where a row is longer."""


class Copier:
    """Copies rows of bytes between tensors on CPU; `num_threads` None: as many as the process has cores, at most 8."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise ArgumentError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads or min(8, _num_cores())
        # The caller is one of the threads.
        self._others = ThreadPoolExecutor(self.num_threads - 1) if self.num_threads > 1 else None
        self._local = local()

    # ---- what is copied ---------------------------------------------------------------------------------------------

    def copy_rows(self, source: Tensor, source_ids: Ids, destination: Tensor, destination_ids: Ids) -> None:
        """Copy row `source_ids[i]` of `source` into row `destination_ids[i]` of `destination`.

        Both are uint8 `[num_rows, num_bytes]`, dense in the last axis; ids are ints `[n]`. No row is both read and
        written, and none written twice. Raises `LayoutError` for tensors of other kinds, `ArgumentError` for ids
        outside of them; then nothing is copied.
        """
        self.copy_pairs([(source, destination)], source_ids, destination_ids)

    def gather(
        self, planes: Sequence[Tensor], layout: BlockLayout, ids: Ids, rows: Tensor, num_tokens: int | None = None
    ) -> None:
        """Copy blocks out of the planes of a group, `[num_blocks, plane_bytes]` each, into rows, one after the other.

        `rows` is uint8 `[n, at least layout.num_bytes]`. With `num_tokens`, only the first tokens of each plane are
        copied, and the rest of `rows` is as it was.
        """
        pairs = paired(planes, columns_of(rows, layout), layout, num_tokens)
        self.copy_pairs(pairs, ids, np.arange(len(ids)))

    def scatter(
        self, rows: Tensor, planes: Sequence[Tensor], layout: BlockLayout, ids: Ids, num_tokens: int | None = None
    ) -> None:
        """Copy rows into the blocks `ids` of the planes of a group: `gather` back."""
        pairs = paired(columns_of(rows, layout), planes, layout, num_tokens)
        self.copy_pairs(pairs, np.arange(len(ids)), ids)

    def copy_pairs(self, pairs: Sequence[Pair], source_ids: Ids, destination_ids: Ids) -> None:
        """Copy the same rows of several pairs of tensors, as `copy_rows` does those of one."""
        sources, destinations = _checked(pairs, source_ids, destination_ids)
        if len(sources):
            self._run(list(self._tasks(pairs, sources, destinations)))

    def copy(self, job: Job) -> None:
        """Do a job whose tensors are on CPU."""
        if job.offsets is not None:
            _copy_tokens(job, *job.offsets)
        elif job.overlaps:
            for source, destination in job.pairs:
                destination[torch.from_numpy(job.destinations)] = source[torch.from_numpy(job.sources)]
        else:
            self.copy_pairs(job.pairs, job.sources, job.destinations)

    def close(self) -> None:
        """End the threads; calls after it are made on one thread."""
        others, self._others = self._others, None
        if others is not None:
            others.shutdown()

    # ---- how --------------------------------------------------------------------------------------------------------

    def _tasks(self, pairs: Sequence[Pair], sources: Ids, destinations: Ids) -> Iterator[_Task]:
        for pair in pairs:
            source, destination = pair[0].numpy(), pair[1].numpy()
            yield from _tasks(source, sources, destination, destinations)

    def _run(self, tasks: list[_Task]) -> None:
        """Do all tasks, on several threads where there are several; raise the first error after all have stopped."""
        queue = deque(tasks)
        helpers = []
        if self._others is not None:
            helpers = [self._others.submit(self._work, queue) for _ in range(min(len(tasks), self.num_threads) - 1)]
        try:
            self._work(queue)
        finally:
            queue.clear()
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def _work(self, queue: deque[_Task]) -> None:
        buffer = self._buffer()
        while queue:
            try:
                task = queue.popleft()
            except IndexError:  # another thread has taken the last one
                return
            task(buffer)

    def _buffer(self) -> Bytes:
        """Return the buffer of this thread."""
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(BUFFER_BYTES, np.uint8)
        return buffer


def _tasks(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids) -> Iterator[_Task]:
    """Cut the copy of rows into tasks."""
    width = source.shape[1]
    num_pieces = len(_piece_starts(source, sources, destination, destinations))
    is_large = len(sources) * width >= LARGE_PIECE_BYTES * num_pieces
    way, num_rows = (_by_piece, TASK_BYTES // width) if is_large else (_through_buffer, BUFFER_BYTES // width)
    for start in range(0, len(sources), max(1, num_rows)):
        part = slice(start, start + max(1, num_rows))
        yield partial(way, source, sources[part], destination, destinations[part])


def _by_piece(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids, _: Bytes) -> None:
    """Call `memmove` for each run of rows that are neighbours on both sides; no other thread waits meanwhile."""
    starts = _piece_starts(source, sources, destination, destinations)
    sizes = np.diff(starts, append=len(sources)) * source.shape[1]
    read = source.ctypes.data + sources[starts] * source.strides[0]
    written = destination.ctypes.data + destinations[starts] * destination.strides[0]
    deque(map(memmove, written.tolist(), read.tolist(), sizes.tolist()), maxlen=0)


def _through_buffer(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids, buffer: Bytes) -> None:
    """Gather rows in the cache, and scatter them from there; a side whose rows are neighbours needs no buffer."""
    if _is_run(destinations):
        _gather(source, sources, destination[destinations[0] : destinations[-1] + 1])
        return
    if _is_run(sources):
        rows = source[sources[0] : sources[-1] + 1]
    else:
        rows = buffer[: len(sources) * source.shape[1]].reshape(len(sources), -1)
        _gather(source, sources, rows)
    destination[destinations] = rows


def _gather(source: Bytes, ids: Ids, out: Bytes) -> None:
    if source.flags.c_contiguous and out.flags.c_contiguous:
        np.take(source, ids, axis=0, out=out, mode="clip")  # other modes copy `out` first
    else:  # NumPy would copy all of what is not contiguous
        torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(ids), out=torch.from_numpy(out))


def _copy_tokens(job: Job, source_offsets: Ids, destination_offsets: Ids) -> None:
    """Copy single tokens, which may move past each other in one block: all are read before any is written."""
    read = torch.from_numpy(job.sources), torch.from_numpy(source_offsets)
    written = torch.from_numpy(job.destinations), torch.from_numpy(destination_offsets)
    for source, destination in job.pairs:
        destination[written] = source[read]


def _piece_starts(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids) -> Ids:
    """Return where in the ids pieces begin: rows that follow one another in memory, on both sides, are one piece."""
    width = source.shape[1]
    if source.strides[0] != width or destination.strides[0] != width:
        return np.arange(len(sources))
    breaks = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
    return np.concatenate([[0], np.flatnonzero(breaks) + 1])


def _is_run(ids: Ids) -> bool:
    return int(ids[-1] - ids[0]) == len(ids) - 1 and bool((np.diff(ids) == 1).all())


def _checked(pairs: Sequence[Pair], source_ids: Ids, destination_ids: Ids) -> tuple[Ids, Ids]:
    """Return ids as int64; addresses are made of them, so none may be outside."""
    sources, destinations = (np.ascontiguousarray(ids, np.int64) for ids in (source_ids, destination_ids))
    if sources.ndim != 1 or sources.shape != destinations.shape:
        raise LayoutError(f"ids must be [n] on both sides, got {list(sources.shape)} and {list(destinations.shape)}")
    for source, destination in pairs:
        if source.shape[1:] != destination.shape[1:]:
            raise LayoutError(f"rows of {list(source.shape[1:])} cannot be copied into {list(destination.shape[1:])}")
        _check_side(source, sources, "source")
        _check_side(destination, destinations, "destination")
    return sources, destinations


def _check_side(rows: Tensor, ids: Ids, side: str) -> None:
    if rows.dtype != torch.uint8 or rows.device.type != "cpu" or rows.ndim != 2 or rows.stride(1) != 1:
        raise LayoutError(
            f"the {side} must be uint8 [num_rows, num_bytes] on CPU, dense in its last axis, "
            f"got {rows.dtype} {list(rows.shape)} of strides {list(rows.stride())} on {rows.device}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows.shape[0]:
        raise ArgumentError(f"{side} ids must be in [0, {rows.shape[0]}), got {ids.min()} to {ids.max()}")


def _num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
