"""A segment: a file of slots of one size, which begins with the records of what the slots hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.tiers.disk.checksums import WholeChecksum
from kvist.tiers.disk.files import Files, read_fully, write_fully

__all__ = ["ALIGNMENT", "Entry", "Geometry", "Record", "Seal", "Segment", "aligned", "neighbours"]

ALIGNMENT = 4096
"""Slots begin and end at pages: the page cache never has to read what is to be written, and direct I/O is possible."""

RECORD_BYTES = 128
"""Divides a sector, so that a record is on the disk or not, and its neighbours stay as they were."""

STAMP_BYTES = 8
MAX_STAMP = 1 << 62
"""Greater stamps are damaged ones."""

MAX_SLOTS = 1 << 40
"""More than a name can say."""

DIGEST, SAID = Struct("<Q"), Struct("<B64sQQ39x")
NOT_NOTHING = 1 << 63
"""Is in each digest, since a record that begins with zeros is none."""

NAME = re.compile(r"(\d{8})-([1-9]\d{0,14})x([1-9]\d{0,9})\.blocks")


def aligned(num_bytes: int) -> int:
    """Round up to pages.

    >>> aligned(1), aligned(4096)
    (4096, 4096)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a segment has what; all of it can be read off the file's name, so that no header can be lost.

        records [num_slots, 128] | stamps of last use [num_slots], uint64 | to a page | slots [num_slots, slot_bytes]

    >>> Geometry.parse("00000007-5000x3.blocks")
    Geometry(number=7, block_bytes=5000, num_slots=3)
    >>> Geometry(7, 5000, 3).slot_offset(1), Geometry(7, 5000, 3).num_bytes
    (12288, 28672)
    """

    number: int
    block_bytes: int
    num_slots: int

    @classmethod
    def parse(cls, name: str) -> Geometry | None:
        """Return what a file's name says, or None if it is not the name of a segment."""
        found = NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None

    @classmethod
    def fitting(cls, number: int, block_bytes: int, num_bytes: int) -> Geometry | None:
        """Return the segment with the most slots that takes at most `num_bytes`, or None if not one slot fits."""
        num_slots = num_bytes // (aligned(block_bytes) + RECORD_BYTES + STAMP_BYTES)
        while num_slots > 0:
            found = cls(number, block_bytes, num_slots)
            if found.num_bytes <= num_bytes:
                return found
            num_slots -= 1
        return None

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:08}-{self.block_bytes}x{self.num_slots}.blocks"

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of a block, and what is left of its last page."""
        return aligned(self.block_bytes)

    @property
    def header_bytes(self) -> int:
        """Bytes before the first slot."""
        return aligned(self.num_slots * (RECORD_BYTES + STAMP_BYTES))

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.slot_offset(self.num_slots)

    @property
    def stamps_offset(self) -> int:
        """Where the stamps are."""
        return self.num_slots * RECORD_BYTES

    def slot_offset(self, slot: int) -> int:
        """Where a slot is."""
        return self.header_bytes + slot * self.slot_bytes


class Record(NamedTuple):
    """What is said of a slot's contents. `stamp` is the time it was put, in uses of the store."""

    key: bytes
    checksum: int
    stamp: int


class Seal:
    """Makes records valid, and tells those that are: each begins with a checksum of the rest, seeded with the format.

    So a record of another format, or a damaged one, is none.

    >>> from zlib import crc32
    >>> seal = Seal(crc32, seed=1)
    >>> seal.opened(seal.sealed(b"a key", 7, 1))
    Record(key=b'a key', checksum=7, stamp=1)
    >>> seal.opened(Seal(crc32, seed=2).sealed(b"a key", 7, 1)) is None
    True
    """

    def __init__(self, checksum: WholeChecksum, seed: int) -> None:
        self._checksum, self._seed = checksum, seed

    def sealed(self, key: bytes, checksum: int, stamp: int) -> bytes:
        """Return the 128 bytes that say it."""
        said = SAID.pack(len(key), key, checksum, stamp)
        return DIGEST.pack(self._checksum(said, self._seed) | NOT_NOTHING) + said

    def opened(self, said: bytes) -> Record | None:
        """Return what 128 bytes say, or None if the seal does not fit them."""
        (digest,), rest = DIGEST.unpack_from(said), said[DIGEST.size :]
        if digest != self._checksum(rest, self._seed) | NOT_NOTHING:
            return None
        key_bytes, key, checksum, stamp = SAID.unpack(rest)
        return Record(key[:key_bytes], checksum, stamp)


def neighbours(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each run of positions that follow each other begins and ends, among positions in ascending order.

    >>> list(neighbours([3, 4, 5, 9]))
    [(0, 3), (3, 4)]
    """
    breaks = [nth for nth, (last, position) in enumerate(pairwise(positions), 1) if last + 1 != position]
    return pairwise([0, *breaks, len(positions)] if positions else [])


class Entry:
    """Contents that are in a slot, or are being written there.

    `position` is that of its slot among all that are open: neighbours in a segment have neighbouring ones.
    `num_readers` read it at this moment, so that its slot must not be given to others. `is_dropped` says that it was
    dropped in the meantime: whoever is busy with it last lets go of it.
    """

    __slots__ = ("checksum", "is_dropped", "key", "num_readers", "position", "segment", "slot")

    def __init__(self, key: bytes, segment: Segment, slot: int, checksum: int = 0) -> None:
        self.key, self.segment, self.slot, self.checksum = key, segment, slot, checksum
        self.position = segment.first_position + slot
        self.num_readers = 0
        self.is_dropped = False

    @property
    def stamp(self) -> int:
        """When it was last used."""
        return int(self.segment.stamps[self.slot])


class Segment:
    """An open segment. `num_busy` counts entries being read or written: only at 0 may it be removed.

    `last_use` is the greatest stamp of its entries, as far as they have been used since it was opened. `ordinal` is
    another one for each segment that a store opens.
    """

    def __init__(
        self, geometry: Geometry, files: Files, file: int, direct: int | None, seal: Seal, ordinal: int
    ) -> None:
        self.geometry, self.files, self.file, self.direct = geometry, files, file, direct
        self.name, self.block_bytes, self.slot_bytes = geometry.name, geometry.block_bytes, geometry.slot_bytes
        self.num_padding = self.slot_bytes - self.block_bytes
        self.first_offset, self.first_position = geometry.slot_offset(0), ordinal * MAX_SLOTS
        self.stamps: npt.NDArray[np.uint64] = np.zeros(geometry.num_slots, np.uint64)
        self.last_use = self.num_busy = 0
        self.has_unwritten_stamps = False
        self._seal = seal

    def entries(self) -> Iterator[Entry]:
        """Read the records, and give an entry for each valid one whose slot is whole in the file; sets the stamps."""
        geometry = self.geometry
        header = bytearray(geometry.header_bytes)
        read_fully(self.files, self.file, [header], 0)
        stamps = np.frombuffer(header, "<u8", geometry.num_slots, geometry.stamps_offset)
        self.stamps[:] = np.where(stamps < MAX_STAMP, stamps, 0)
        length = self.files.num_bytes(self.file)
        seals = np.frombuffer(header, "<u8", geometry.stamps_offset // 8)[:: RECORD_BYTES // 8]
        for slot in np.flatnonzero(seals).tolist():
            record = self._seal.opened(bytes(header[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]))
            if record is not None and geometry.slot_offset(slot) + geometry.block_bytes <= length:
                self.stamps[slot] = max(record.stamp, int(self.stamps[slot]))
                yield Entry(record.key, self, slot, record.checksum)

    def sealed(self, entry: Entry, stamp: int) -> bytes:
        """Return the record of an entry that was put at a time."""
        return self._seal.sealed(entry.key, entry.checksum, stamp)

    def write_records(self, slot: int, sealed: Sequence[bytes]) -> None:
        """Say what is in neighbouring slots; raises OSError."""
        write_fully(self.files, self.file, [b"".join(sealed)], slot * RECORD_BYTES)

    def clear(self, slot: int, num_slots: int = 1) -> None:
        """Say that neighbouring slots hold nothing; raises OSError."""
        write_fully(self.files, self.file, [bytes(num_slots * RECORD_BYTES)], slot * RECORD_BYTES)

    def write_all_records(self, entries: Iterable[Entry]) -> None:
        """Say that the segment holds these and nothing else; raises OSError."""
        records = bytearray(self.geometry.num_slots * RECORD_BYTES)
        for entry in entries:
            records[entry.slot * RECORD_BYTES : (entry.slot + 1) * RECORD_BYTES] = self.sealed(entry, entry.stamp)
        write_fully(self.files, self.file, [records], 0)

    def write_stamps(self) -> None:
        """Save the order of use, which is only approximate after `kill -9`; raises OSError."""
        if self.has_unwritten_stamps:
            self.has_unwritten_stamps = False
            write_fully(self.files, self.file, [self.stamps.astype("<u8").tobytes()], self.geometry.stamps_offset)

    def expect(self, slot: int, num_slots: int) -> None:
        """Have slots read ahead."""
        self.files.expect(self.file, self.geometry.slot_offset(slot), num_slots * self.geometry.slot_bytes)

    def close(self) -> None:
        """Let go of the file."""
        self.files.close(self.file)
        if self.direct is not None:
            self.files.close(self.direct)
