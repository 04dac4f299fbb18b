"""Moves contents between callers' buffers and slots, as many neighbouring slots at once as pay."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvist.tiers.disk.files import Buffer, read_fully, write_fully
from kvist.tiers.disk.segments import ALIGNMENT, Entry, Segment

__all__ = ["Buffered", "Direct", "Piece", "Run", "runs"]

RUN_BYTES = 1 << 20
"""Of one call and the checksums after it: what still lies in the processor's cache then."""

DIRECT_RUN_BYTES = 1 << 22
"""Of one call past the page cache, where nothing reads ahead: long ones keep the device busy."""

MAX_RUN_SLOTS = 256
"""Two buffers each, one of them for the padding, are well below what one call takes."""

PADDING = memoryview(bytes(ALIGNMENT))


class Piece(NamedTuple):
    """An entry, and the buffer of bytes that its contents are in or shall be in; `place` is that in the call."""

    entry: Entry
    buffer: memoryview
    place: int


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces in neighbouring slots of one segment, in order."""

    pieces: Sequence[Piece]

    @property
    def segment(self) -> Segment:
        """The segment."""
        return self.pieces[0].entry.segment

    @property
    def first(self) -> int:
        """The first slot."""
        return self.pieces[0].entry.slot

    @property
    def offset(self) -> int:
        """Where the first slot is in the file."""
        return self.segment.geometry.slot_offset(self.first)

    @property
    def num_slots(self) -> int:
        """How many slots."""
        return len(self.pieces)

    def follows(self, other: Run) -> bool:
        """Whether the other run ends where this one begins."""
        return other.segment is self.segment and other.first + other.num_slots == self.first

    def singly(self) -> list[Run]:
        """Return a run for each piece."""
        return [Run([piece]) for piece in self.pieces]


def runs(pieces: Iterable[Piece], num_bytes: int) -> list[Run]:
    """Cut pieces into runs of at most about `num_bytes`, in the order of their slots."""
    found: list[list[Piece]] = []
    last: Entry | None = None
    room = 0
    for piece in sorted(pieces, key=attrgetter("entry.segment.name", "entry.slot")):
        entry = piece.entry
        if room and last is not None and last.segment is entry.segment and last.slot + 1 == entry.slot:
            found[-1].append(piece)
            room -= 1
        else:
            found.append([piece])
            room = min(num_bytes // entry.segment.slot_bytes, MAX_RUN_SLOTS) - 1
        last = entry
    return [Run(each) for each in found]


class Buffered:
    """Moves contents through the page cache, straight from and into the callers' buffers."""

    run_bytes = RUN_BYTES

    def __init__(self, checksum: Callable[[memoryview], int]) -> None:
        self._checksum = checksum

    def expect(self, run: Run) -> None:
        """Have the system read what will be asked for."""
        with suppress(OSError):  # reading will tell
            run.segment.expect(run.first, run.num_slots)

    def write(self, run: Run) -> None:
        """Write contents into their slots, and note their checksums; raises OSError."""
        for piece in run.pieces:
            piece.entry.checksum = self._checksum(piece.buffer)
        write_fully(run.segment.files, self._file(run), self._padded(run, PADDING), run.offset)

    def read(self, run: Run) -> list[bool]:
        """Read contents from their slots, and say of each whether it is what was written; raises OSError."""
        scratch = memoryview(bytearray(ALIGNMENT))
        num_bytes = read_fully(run.segment.files, self._file(run), self._padded(run, scratch), run.offset)
        slot_bytes, block_bytes = run.segment.geometry.slot_bytes, run.segment.geometry.block_bytes
        return [
            nth * slot_bytes + block_bytes <= num_bytes and self._checksum(piece.buffer) == piece.entry.checksum
            for nth, piece in enumerate(run.pieces)
        ]

    def _file(self, run: Run) -> int:
        return run.segment.file

    def _padded(self, run: Run, padding: memoryview) -> list[Buffer]:
        geometry = run.segment.geometry
        num_padding = geometry.slot_bytes - geometry.block_bytes
        if not num_padding:
            return [piece.buffer for piece in run.pieces]
        return [part for piece in run.pieces for part in (piece.buffer, padding[:num_padding])]


class Direct(Buffered):
    """Moves contents past the page cache, which needs memory at page boundaries: through pages of its own for others.

    A segment that cannot be opened like this goes through the page cache.
    """

    run_bytes = DIRECT_RUN_BYTES

    def __init__(self, checksum: Callable[[memoryview], int], max_block_bytes: int) -> None:
        super().__init__(checksum)
        self._num_bytes = max(DIRECT_RUN_BYTES, -(-max_block_bytes // ALIGNMENT) * ALIGNMENT)
        self._spare: list[mmap.mmap] = []

    def expect(self, run: Run) -> None:
        """Nothing reads ahead here."""

    def write(self, run: Run) -> None:
        """Write contents into their slots, and note their checksums; raises OSError."""
        if _is_aligned(run):
            super().write(run)
            return
        pages, geometry = self._take(), run.segment.geometry
        try:
            for nth, piece in enumerate(run.pieces):
                piece.entry.checksum = self._checksum(piece.buffer)
                begin = nth * geometry.slot_bytes
                pages[begin : begin + geometry.block_bytes] = piece.buffer
            with memoryview(pages) as view, view[: run.num_slots * geometry.slot_bytes] as filled:
                write_fully(run.segment.files, self._file(run), [filled], run.offset)
        finally:
            self._spare.append(pages)

    def read(self, run: Run) -> list[bool]:
        """Read contents from their slots, and say of each whether it is what was written; raises OSError."""
        if _is_aligned(run):
            return super().read(run)
        pages, geometry = self._take(), run.segment.geometry
        try:
            with memoryview(pages) as view, view[: run.num_slots * geometry.slot_bytes] as wanted:
                num_bytes = read_fully(run.segment.files, self._file(run), [wanted], run.offset)
                return [self._copied(piece, nth, wanted, num_bytes) for nth, piece in enumerate(run.pieces)]
        finally:
            self._spare.append(pages)

    def _copied(self, piece: Piece, nth: int, pages: memoryview, num_bytes: int) -> bool:
        geometry = piece.entry.segment.geometry
        begin = nth * geometry.slot_bytes
        contents = pages[begin : begin + geometry.block_bytes]
        if begin + geometry.block_bytes > num_bytes or self._checksum(contents) != piece.entry.checksum:
            return False
        piece.buffer[:] = contents
        return True

    def _file(self, run: Run) -> int:
        return run.segment.file if run.segment.direct is None else run.segment.direct

    def _take(self) -> mmap.mmap:
        return self._spare.pop() if self._spare else mmap.mmap(-1, self._num_bytes)


def _is_aligned(run: Run) -> bool:
    geometry = run.segment.geometry
    return geometry.slot_bytes == geometry.block_bytes and not any(
        np.frombuffer(piece.buffer, np.uint8).__array_interface__["data"][0] % ALIGNMENT for piece in run.pieces
    )
