"""Copies on CUDA streams: scattered planes are gathered on the device, and cross the bus as whole rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from kvist.memory.transfers.devices import COMPUTE, DEMOTE, LOCAL, PROMOTE, Event
from kvist.memory.transfers.jobs import Ids, Job, Pair

__all__ = ["CudaDevice", "chunks", "copy_down", "copy_local", "copy_staged", "copy_up"]

STAGING_BYTES = 64 << 20
"""Device memory that a copy gathers into at a time; several copies in flight on a stream use it one after the other."""


class CudaEvent:
    """A CUDA event. A copy that fails there makes all later work of the process fail, so it has no error of its own."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.cuda = event
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all before it has ended."""
        return bool(self.cuda.query())

    def wait(self) -> None:
        """Make the host wait until it is done."""
        self.cuda.synchronize()


class CudaDevice:
    """Copies on streams of its own; host memory must be pinned, or the host waits for each copy.

    The compute stream is the current stream of the device when it is asked for.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self._staging_bytes = staging_bytes
        self._streams = {name: torch.cuda.Stream(device) for name in (PROMOTE, DEMOTE, LOCAL)}

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Let copies come after what was queued so far, and keep storage until copies in flight are done."""
        for stream in self._streams.values():
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            if tensor.is_cuda:
                for stream in self._streams.values():
                    tensor.record_stream(stream)

    def copy(self, stream: str, job: Job) -> Event:
        """Queue a job."""
        with torch.cuda.stream(self._streams[stream]):
            copy_staged(job, self.device, self._staging_bytes)
        return self.record(stream)

    def record(self, stream: str) -> Event:
        """Return the point that a stream has been filled to."""
        return CudaEvent(self._stream(stream).record_event())

    def wait(self, stream: str, event: Event) -> None:
        """Make what is queued on a stream from now on wait for an event."""
        assert isinstance(event, CudaEvent)
        self._stream(stream).wait_event(event.cuda)

    def _stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if name == COMPUTE else self._streams[name]


def copy_staged(job: Job, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
    """Do a job of which one side is on `device` and the other there or on CPU, on the current stream."""
    if job.offsets is not None:
        _copy_tokens(job, *job.offsets, device)
        return
    source, destination = job.pairs[0]
    for sources, destinations in chunks(job, staging_bytes):
        if source.device == destination.device:
            copy_local(job.pairs, _to(sources, device), _to(destinations, device))
        elif destination.device == device:
            copy_up(job.pairs, sources, _to(destinations, device), device)
        else:
            copy_down(job.pairs, _to(sources, device), destinations, device)


def chunks(job: Job, staging_bytes: int) -> Iterator[tuple[Ids, Ids]]:
    """Cut the job so that what is staged fits; one that writes what it reads stays whole."""
    length = len(job.sources)
    row_bytes = max(1, sum(source.shape[1] for source, _ in job.pairs))
    step = length if job.overlaps else max(1, staging_bytes // row_bytes)
    for start in range(0, length, max(1, step)):
        yield job.sources[start : start + step], job.destinations[start : start + step]


def copy_local(pairs: Iterable[Pair], sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks within the device; all of a pair are read before any is written."""
    for source, destination in pairs:
        written, read = _wide(destination, source)
        written.index_copy_(0, destinations, read.index_select(0, sources))


def copy_up(pairs: Iterable[Pair], sources: Ids, destinations: Tensor, device: torch.device) -> None:
    """Bring what the rows hold between the first and the last pair over as it is, and scatter it there."""
    columns = [source for source, _ in pairs]
    begin, width = _region(columns)
    rows = _span(columns[0], width)
    staged = torch.empty((len(sources), width), dtype=torch.uint8, device=device)
    for place, (row, count) in _runs(sources, merge=rows.is_contiguous()):
        staged[place : place + count].view(-1).copy_(rows[row : row + count].view(-1), non_blocking=True)
    for source, destination in pairs:
        start = source.data_ptr() - begin
        written, read = _wide(destination, staged[:, start : start + source.shape[1]])
        written.index_copy_(0, destinations, read)


def copy_down(pairs: Iterable[Pair], sources: Tensor, destinations: Ids, device: torch.device) -> None:
    """Gather the pairs next to each other, and write each run of bytes to where it belongs."""
    for columns, destination in _merged(list(pairs)):
        width = destination.shape[1]
        staged = torch.empty((len(sources), width), dtype=torch.uint8, device=device)
        begin = destination.data_ptr()
        for plane, column in columns:
            start = column.data_ptr() - begin
            written, read = _wide(staged[:, start : start + column.shape[1]], plane)
            written.copy_(read.index_select(0, sources))
        for place, (row, count) in _runs(destinations, merge=destination.is_contiguous()):
            piece = destination[row : row + count].view(-1)
            piece.copy_(staged[place : place + count].view(-1), non_blocking=True)


def _merged(pairs: list[Pair]) -> Iterator[tuple[list[Pair], Tensor]]:
    """Group pairs whose destinations follow one another in the rows without a gap, each with the bytes of all."""
    group: list[Pair] = []
    for pair in pairs:
        if group and pair[1].data_ptr() != group[-1][1].data_ptr() + group[-1][1].shape[1]:
            yield group, _span(group[0][1], _region([column for _, column in group])[1])
            group = []
        group.append(pair)
    if group:
        yield group, _span(group[0][1], _region([column for _, column in group])[1])


def _copy_tokens(job: Job, source_offsets: Ids, destination_offsets: Ids, device: torch.device) -> None:
    read = _to(job.sources, device), _to(source_offsets, device)
    written = _to(job.destinations, device), _to(destination_offsets, device)
    for source, destination in job.pairs:
        destination[written] = source[read]


def _region(columns: list[Tensor]) -> tuple[int, int]:
    """Return where in a row the first of its columns begins, as an address, and the bytes to the end of the last."""
    begin = columns[0].data_ptr()
    return begin, columns[-1].data_ptr() + columns[-1].shape[1] - begin


def _span(column: Tensor, width: int) -> Tensor:
    """View `width` bytes of each row, from where a column of it begins."""
    return torch.as_strided(column, (column.shape[0], width), column.stride(), column.storage_offset())


def _runs(ids: Ids, *, merge: bool) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the place of each run of neighbours in the ids, its first id and its length; not `merge`: each id alone."""
    breaks = np.diff(ids) != 1 if merge else np.ones(max(0, len(ids) - 1), np.bool_)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1]) if len(ids) else np.zeros(0, np.int64)
    counts = np.diff(starts, append=len(ids))
    yield from zip(starts.tolist(), zip(ids[starts].tolist(), counts.tolist(), strict=True), strict=True)


def _wide(*sides: Tensor) -> tuple[Tensor, ...]:
    """View rows of bytes as wider numbers where all sides can be, so that kernels move more at a time."""
    aligned = all(
        rows.data_ptr() % 8 == 0
        and rows.storage_offset() % 8 == 0
        and rows.stride(0) % 8 == 0
        and rows.shape[1] % 8 == 0
        for rows in sides
    )
    return tuple(rows.view(torch.int64) for rows in sides) if aligned else sides


def _to(ids: Ids, device: torch.device) -> Tensor:
    """Bring ids to the device; from pinned memory, so that the host need not wait."""
    index = torch.from_numpy(ids)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
