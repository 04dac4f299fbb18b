"""Copies scattered blocks in the memory of this machine, on a few threads, in the way that suits the pieces' size.

Measured on two idle cores, as parts of the speed of one thread's `memcpy` of 512 MiB:

| pieces of | a call for each piece | through the cache | the better one, on one thread | torch, by index |
|---|---|---|---|---|
| 4 KiB | 0.18 | 0.66 | 0.33 | 0.07 |
| 32 KiB | 0.59 | 0.79 | 0.50 | 0.08 |
| 128 KiB | 1.06 | 0.85 | 0.59 | 0.08 |
| 2 MiB | 1.17 | 0.81 | 0.62 | 0.08 |

A `memcpy` of some 100 MiB bypasses the caches, as shorter ones do not: that is why one thread reaches 0.62 at most.
With `GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x8000` it reaches 0.85 with 128 KiB, and 0.98 with 2 MiB.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.errors import ArgumentError, LayoutError
from kvist.memory.layout import BlockLayout
from kvist.memory.transfers.jobs import Ids, Job, Pairs, columns_of, paired

__all__ = ["Copier"]

Bytes = NDArray[np.uint8]

LARGE_PIECE_BYTES = 64 << 10
"""From this size on, a call for each piece costs less than copying twice, once inside the cache."""
CACHED_BYTES = 1 << 20
"""What is gathered at once: it stays in the cache of a core until it is scattered; less costs more calls."""
DIRECT_ROW_BYTES = 16 << 10
"""Up to this size torch gathers rows that lie apart as fast as NumPy, which cannot write them where they belong."""
TASK_BYTES = 4 << 20
"""What a thread takes at once; threads that are slower take fewer."""

FEW_ROWS = 16
"""Up to so many rows of each pair, a call for each piece costs less than NumPy's for each pair."""

_Task = Callable[[], None]
"""A part of a copy, which does not wait for others."""


class Copier:
    """Copies rows of bytes between tensors on CPU; `num_threads` None: as many as the process has cores, at most 8."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise ArgumentError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads or min(8, _num_cores())
        # The caller is one of the threads.
        self._others = ThreadPoolExecutor(self.num_threads - 1) if self.num_threads > 1 else None

    # ---- what is copied ---------------------------------------------------------------------------------------------

    def copy_rows(self, source: Tensor, source_ids: Ids, destination: Tensor, destination_ids: Ids) -> None:
        """Copy row `source_ids[i]` of `source` into row `destination_ids[i]` of `destination`.

        Both are uint8 `[num_rows, num_bytes]`, dense in the last axis; ids are ints `[n]`. No row is both read and
        written, and none written twice. Raises `LayoutError` for tensors of other kinds, `ArgumentError` for ids
        outside of them; then nothing is copied.
        """
        self.copy_pairs(Pairs([(source, destination)]), source_ids, destination_ids)

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

    def copy_pairs(self, pairs: Pairs, source_ids: Ids, destination_ids: Ids) -> None:
        """Copy the same rows of several pairs of tensors, as `copy_rows` does those of one."""
        source, destination = pairs.sides
        sources, destinations = _checked(source_ids), _checked(destination_ids)
        if sources.shape != destinations.shape:
            raise LayoutError(f"there are {len(sources)} source ids, but {len(destinations)} destination ids")
        source.check(sources)
        destination.check(destinations)
        if len(pairs) and len(sources):
            tasks = _few_rows if len(sources) <= FEW_ROWS else _many_rows
            self._run(list(tasks(pairs, sources, destinations)))

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
        while queue:
            try:
                task = queue.popleft()
            except IndexError:  # another thread has taken the last one
                return
            task()


def _few_rows(pairs: Pairs, sources: Ids, destinations: Ids) -> Iterator[_Task]:
    """Cut the copy of few rows of all pairs: each piece is a call, since one for each pair would cost more."""
    source, destination = pairs.sides
    read, written = source.addresses_of(sources).ravel(), destination.addresses_of(destinations).ravel()
    sizes = np.repeat(pairs.widths, len(sources))
    step = max(1, TASK_BYTES * len(sizes) // max(1, int(sizes.sum())))
    for start in range(0, len(sizes), step):
        part = slice(start, start + step)
        yield partial(_move, written[part].tolist(), read[part].tolist(), sizes[part].tolist())


def _many_rows(pairs: Pairs, sources: Ids, destinations: Ids) -> Iterator[_Task]:
    """Cut the copy of many rows of each pair."""
    for source, destination in zip(*(side.arrays for side in pairs.sides), strict=True):
        width = source.shape[1]
        num_pieces = len(_piece_starts(source, sources, destination, destinations))
        is_large = len(sources) * width >= LARGE_PIECE_BYTES * num_pieces
        way, num_bytes = (_by_piece, TASK_BYTES) if is_large else (_through_cache, CACHED_BYTES)
        step = max(1, num_bytes // width)
        for start in range(0, len(sources), step):
            part = slice(start, start + step)
            yield partial(way, source, sources[part], destination, destinations[part])


def _by_piece(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids) -> None:
    """Call `memmove` for each run of rows that are neighbours on both sides; no other thread waits meanwhile."""
    starts = _piece_starts(source, sources, destination, destinations)
    sizes = np.diff(starts, append=len(sources)) * source.shape[1]
    read = source.ctypes.data + sources[starts] * source.strides[0]
    written = destination.ctypes.data + destinations[starts] * destination.strides[0]
    _move(written.tolist(), read.tolist(), sizes.tolist())


def _move(destinations: list[int], sources: list[int], sizes: list[int]) -> None:
    deque(map(memmove, destinations, sources, sizes), maxlen=0)


def _through_cache(source: Bytes, sources: Ids, destination: Bytes, destinations: Ids) -> None:
    """Gather rows where the cache keeps them, and scatter them from there; neighbours need no second copy."""
    is_direct = source.shape[1] <= DIRECT_ROW_BYTES or (source.flags.c_contiguous and destination.flags.c_contiguous)
    if is_direct and _is_run(destinations):
        _gather(source, sources, destination[destinations[0] : destinations[-1] + 1])
    elif _is_run(sources):
        destination[destinations] = source[sources[0] : sources[-1] + 1]
    else:
        destination[destinations] = source[sources]


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


def _checked(ids: Ids) -> Ids:
    """Return ids `[n]` as int64, a copy: torch takes no read-only arrays."""
    checked = np.array(ids, np.int64)
    if checked.ndim != 1:
        raise LayoutError(f"ids must be [n], got {list(checked.shape)}")
    return checked


def _num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
