"""Moves contents between callers' buffers and slots, as many neighbouring slots at once as pay."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from kvist.tiers.disk.checksums import Checksum
from kvist.tiers.disk.files import Buffer, read_fully, write_fully
from kvist.tiers.disk.segments import ALIGNMENT, Entry, Segment, neighbours
from kvist.tiers.disk.sharing import PART_BYTES

__all__ = ["MAX_RUN_SLOTS", "Buffered", "Direct", "Piece", "Run", "huge_page", "runs"]

DIRECT_PART_BYTES = HUGE_PAGE_BYTES = 1 << 21
"""Of one call past the page cache, where nothing reads ahead: long ones keep the device busy."""

MAX_RUN_SLOTS = 256
"""Two buffers each, one of them for the padding, are well below what one call takes."""

PADDING = memoryview(bytes(ALIGNMENT))
POSITION = attrgetter("entry.position")


@dataclass(slots=True, eq=False)
class Piece:
    """An entry, and the buffer of bytes that its contents are in or shall be in; `place` is that in the call."""

    entry: Entry
    buffer: memoryview
    place: int


class Run:
    """Pieces in neighbouring slots of one segment, in order; `offset` is where the `first` slot is in the file."""

    __slots__ = ("first", "num_slots", "offset", "pieces", "segment")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        entry = pieces[0].entry
        self.pieces, self.num_slots = pieces, len(pieces)
        self.segment: Segment = entry.segment
        self.first: int = entry.slot
        self.offset = entry.segment.first_offset + entry.slot * entry.segment.slot_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all its slots."""
        return self.num_slots * self.segment.slot_bytes

    def follows(self, other: Run) -> bool:
        """Whether the other run ends where this one begins."""
        return other.segment is self.segment and other.first + other.num_slots == self.first

    def singly(self) -> list[Run]:
        """Return a run for each piece."""
        return [Run([piece]) for piece in self.pieces]


def runs(pieces: Iterable[Piece], num_bytes: int) -> list[Run]:
    """Cut pieces into runs of at most about `num_bytes`, in the order of their slots."""
    ordered = sorted(pieces, key=POSITION)
    found = []
    for begin, end in neighbours(list(map(POSITION, ordered))):
        num_slots = min(max(1, num_bytes // ordered[begin].entry.segment.slot_bytes), MAX_RUN_SLOTS)
        found += [Run(ordered[first : min(first + num_slots, end)]) for first in range(begin, end, num_slots)]
    return found


class Buffered:
    """Moves contents through the page cache, straight from and into the callers' buffers."""

    part_bytes = PART_BYTES

    def __init__(self, checksum: Checksum) -> None:
        self._checksum = checksum

    def expect(self, run: Run) -> None:
        """Have the system read what will be asked for."""
        with suppress(OSError):  # reading will tell
            run.segment.expect(run.first, run.num_slots)

    def write(self, run: Run) -> None:
        """Write contents into their slots, and note their checksums; raises OSError."""
        if run.segment.slot_bytes > self.part_bytes:
            self._write_in_parts(run)
            return
        write_fully(run.segment.files, run.segment.file, _padded(run, PADDING), run.offset)
        whole = self._checksum.whole
        for piece in run.pieces:
            piece.entry.checksum = whole(piece.buffer)

    def _write_in_parts(self, run: Run) -> None:
        piece, checksum = run.pieces[0], self._checksum.begun()
        for begin, buffers in self._parts(run, PADDING):
            write_fully(run.segment.files, run.segment.file, buffers, run.offset + begin)
            checksum.update(piece.buffer[begin : begin + self.part_bytes])
        piece.entry.checksum = checksum.intdigest()

    def read(self, run: Run) -> list[bool]:
        """Read contents from their slots, and say of each whether it is what was written; raises OSError."""
        if run.segment.slot_bytes > self.part_bytes:
            return [self._read_in_parts(run)]
        num_bytes = read_fully(run.segment.files, run.segment.file, _padded(run, _scratch(run)), run.offset)
        slot_bytes, block_bytes, whole = run.segment.slot_bytes, run.segment.block_bytes, self._checksum.whole
        return [
            end <= num_bytes and whole(piece.buffer) == piece.entry.checksum
            for end, piece in zip(range(block_bytes, run.num_bytes + 1, slot_bytes), run.pieces, strict=True)
        ]

    def _read_in_parts(self, run: Run) -> bool:
        piece, checksum, num_bytes = run.pieces[0], self._checksum.begun(), 0
        for begin, buffers in self._parts(run, _scratch(run)):
            num_bytes += read_fully(run.segment.files, run.segment.file, buffers, run.offset + begin)
            checksum.update(piece.buffer[begin : begin + self.part_bytes])
        return num_bytes >= run.segment.block_bytes and checksum.intdigest() == piece.entry.checksum

    def _parts(self, run: Run, padding: memoryview) -> Iterator[tuple[int, list[Buffer]]]:
        """Where each part of a large slot begins, and the buffers for it; the last one has the padding."""
        contents, num_padding = run.pieces[0].buffer, run.segment.num_padding
        for begin in range(0, len(contents), self.part_bytes):
            part = contents[begin : begin + self.part_bytes]
            is_last = begin + len(part) == len(contents)
            yield begin, [part, padding[:num_padding]] if is_last and num_padding else [part]


class Direct(Buffered):
    """Moves contents past the page cache, through huge pages of its own that are used again and again.

    Such memory must begin at a page, and callers' need not. Where theirs does, it would still be slower: a device takes
    only so many pieces of memory at once, and a huge page is one; and it, or the host of a virtual one, fills memory
    sooner that the processor's cache holds. Large gets took 0.6 of the time that they took without, puts 0.9.

    A segment that cannot be opened like this goes through the page cache.
    """

    part_bytes = DIRECT_PART_BYTES

    def __init__(self, checksum: Checksum) -> None:
        super().__init__(checksum)
        self._spare: list[memoryview] = []

    def expect(self, run: Run) -> None:
        """Nothing reads ahead here."""

    def write(self, run: Run) -> None:
        """Write contents into their slots, and note their checksums; raises OSError."""
        with self._page() as page:
            if run.segment.slot_bytes > self.part_bytes:
                self._write_through(page, run)
                return
            for begin, piece in _places(run):
                _copy(piece.buffer, page[begin:])
                piece.entry.checksum = self._checksum.whole(page[begin : begin + len(piece.buffer)])
            write_fully(run.segment.files, _direct(run), [page[: run.num_bytes]], run.offset)

    def _write_through(self, page: memoryview, run: Run) -> None:
        piece, checksum = run.pieces[0], self._checksum.begun()
        for begin, num_bytes in self._windows(run):
            part = piece.buffer[begin : begin + num_bytes]
            _copy(part, page)
            checksum.update(page[: len(part)])
            write_fully(run.segment.files, _direct(run), [page[:num_bytes]], run.offset + begin)
        piece.entry.checksum = checksum.intdigest()

    def read(self, run: Run) -> list[bool]:
        """Read contents from their slots, and say of each whether it is what was written; raises OSError."""
        with self._page() as page:
            if run.segment.slot_bytes > self.part_bytes:
                return [self._read_through(page, run)]
            num_read = read_fully(run.segment.files, _direct(run), [page[: run.num_bytes]], run.offset)
            return [self._taken(page[begin:num_read], piece) for begin, piece in _places(run)]

    def _taken(self, read: memoryview, piece: Piece) -> bool:
        contents = read[: len(piece.buffer)]
        if len(contents) < len(piece.buffer) or self._checksum.whole(contents) != piece.entry.checksum:
            return False
        _copy(contents, piece.buffer)
        return True

    def _read_through(self, page: memoryview, run: Run) -> bool:
        piece, checksum, num_read = run.pieces[0], self._checksum.begun(), 0
        for begin, num_bytes in self._windows(run):
            num_read += read_fully(run.segment.files, _direct(run), [page[:num_bytes]], run.offset + begin)
            part = piece.buffer[begin : begin + num_bytes]
            checksum.update(page[: len(part)])
            _copy(page[: len(part)], part)
        return num_read >= run.segment.block_bytes and checksum.intdigest() == piece.entry.checksum

    def _windows(self, run: Run) -> Iterator[tuple[int, int]]:
        """Where each part of a large slot begins, and how many bytes it has; the last one has the padding."""
        slot_bytes = run.segment.slot_bytes
        return ((begin, min(self.part_bytes, slot_bytes - begin)) for begin in range(0, slot_bytes, self.part_bytes))

    @contextmanager
    def _page(self) -> Iterator[memoryview]:
        try:
            page = self._spare.pop()
        except IndexError:
            page = huge_page()
        try:
            yield page
        finally:
            self._spare.append(page)


def _padded(run: Run, padding: memoryview) -> list[Buffer]:
    if not run.segment.num_padding:
        return [piece.buffer for piece in run.pieces]
    return [part for piece in run.pieces for part in (piece.buffer, padding[: run.segment.num_padding])]


def _scratch(run: Run) -> memoryview:
    """Where padding is read to, which is nothing but padding."""
    return memoryview(bytearray(run.segment.num_padding))


def _places(run: Run) -> Iterator[tuple[int, Piece]]:
    """Where in a run each of its slots begins."""
    return zip(range(0, run.num_bytes, run.segment.slot_bytes), run.pieces, strict=True)


def _direct(run: Run) -> int:
    return run.segment.file if run.segment.direct is None else run.segment.direct


def huge_page() -> memoryview:
    """Return a huge page where the system has them, else as many small ones."""
    pages = mmap.mmap(-1, 2 * HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    begin = -_address(pages) % HUGE_PAGE_BYTES
    return memoryview(pages)[begin : begin + HUGE_PAGE_BYTES]


def _address(buffer: Buffer | mmap.mmap) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes to where a target begins; other threads run meanwhile, which memoryview would not let them."""
    np.frombuffer(target, np.uint8, len(source))[:] = np.frombuffer(source, np.uint8)
