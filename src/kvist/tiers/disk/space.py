"""Which slot holds what: the index in memory, the order of use, and which segments the capacity has room for."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, zip_longest
from operator import attrgetter

from kvist.tiers.counting import Counts
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.segments import Entry, Geometry, Seal, Segment, neighbours
from kvist.tiers.disk.sharing import PART_BYTES, SHARED_BYTES

__all__ = ["Slot", "Space"]

Slot = tuple[Segment, int]
Named = tuple[int, bytes]
POSITION = attrgetter("first_position")

MAX_SEGMENTS = 10**8
"""Numbers have eight digits."""

NUM_TWINS = 32
"""Pairs of segments in a full store: few enough open files, and small enough steps to grow by."""

MIN_TWINS_BYTES = 64 << 20
"""Below this, a quarter of the capacity is the limit: segments of few slots have few neighbours to read at once."""


class Space:
    """The segments of a directory, and the entries in them, least recently used first for each size of block.

    Nothing here is safe against other threads. Errors of the file system are counted, and what cannot be written or
    read is left alone. A slot is in exactly one of these places: free, held by an entry in a queue, taken by a caller,
    or, after an error, retired until the store is opened again.

    Segments are made in twos, and their slots offered by turns: file systems let one thread at a time write to a file,
    and two shall write the halves of a call. Small ones, which hold no call that is shared, are made one by one.
    """

    def __init__(self, files: Files, limit: int, sizes: Collection[int], seal: Seal, counts: Counts) -> None:
        self.limit = limit
        self.queues: dict[int, OrderedDict[bytes, Entry]] = {size: OrderedDict() for size in sizes}
        self.segments: dict[str, Segment] = {}
        self.is_direct = False
        self._files, self._seal, self._counts = files, seal, counts
        self._free: dict[int, list[Slot]] = {size: [] for size in sizes}
        self._least_bytes = {size: Geometry(0, size, 1).num_bytes for size in sizes}
        self._num_segment_bytes = 0
        self._left_behind: dict[str, int] = {}  # files that could not be read or removed, and their bytes
        self._doubtful: set[Segment] = set()  # whose records may say more than the entries do
        self._next_number = self._num_opened = 0

    @property
    def num_file_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self._left_behind.values()) + self._num_segment_bytes

    # opening

    def load(self) -> int:
        """Open all segments and read their records; returns the greatest stamp. What is too much goes, oldest first."""
        found: dict[Named, Entry] = {}
        for name in self._files.names():
            geometry = Geometry.parse(name)
            if geometry is not None:
                self._next_number = max(self._next_number, geometry.number + 1) % MAX_SEGMENTS
                self._load(name, geometry, found)
        self._enqueue(found)
        while self.num_file_bytes > self.limit and self.segments:
            self._remove(min(self.segments.values(), key=lambda segment: segment.last_use))
        return max((segment.last_use for segment in self.segments.values()), default=0)

    def _load(self, name: str, geometry: Geometry, found: dict[Named, Entry]) -> None:
        if geometry.block_bytes not in self.queues or geometry.num_bytes > self.limit:
            self._unlink(geometry)
            return
        try:
            segment = self._opened(geometry, self._files.open(name))
        except OSError as error:
            self._pass_over(geometry, error)
            return
        try:
            entries = list(segment.entries())
        except OSError as error:
            segment.close()
            self._pass_over(geometry, error)
            return
        self._add(segment)
        for entry in entries:
            self._settle(entry, found)

    def _pass_over(self, geometry: Geometry, error: OSError) -> None:
        """Leave a file alone that cannot be read, though it takes room; only names that are links go."""
        self._counts.add(num_errors=1)
        if error.errno in (errno.ELOOP, errno.EMLINK):
            self._unlink(geometry)
        else:
            self._left_behind[geometry.name] = geometry.num_bytes

    def _unlink(self, geometry: Geometry) -> None:
        """Take a file away; where that fails, it still takes room."""
        try:
            self._files.remove(geometry.name)
        except FileNotFoundError:
            pass
        except OSError:
            self._counts.add(num_errors=1)
            self._left_behind[geometry.name] = geometry.num_bytes

    def _settle(self, entry: Entry, found: dict[Named, Entry]) -> None:
        """Keep an entry; of two with one key, which an error may have left, the one put or used last."""
        name = (entry.segment.geometry.block_bytes, entry.key)
        other = found.get(name)
        found[name] = entry if other is None or other.stamp < entry.stamp else other
        if other is not None:
            older = other if found[name] is entry else entry
            self.clear([(older.segment, older.slot)])

    def _enqueue(self, found: dict[Named, Entry]) -> None:
        for entry in sorted(found.values(), key=lambda entry: entry.stamp):
            segment = entry.segment
            self.queues[segment.geometry.block_bytes][entry.key] = entry
            segment.last_use = max(segment.last_use, entry.stamp)
        taken = {(entry.segment.name, entry.slot) for entry in found.values()}
        for size in self.queues:
            same = [segment for segment in self.segments.values() if segment.block_bytes == size]
            for first in range(0, len(same), 2):
                self._offer(same[first : first + 2], taken)

    def _offer(self, twins: Sequence[Segment], taken: Collection[tuple[str, int]] = ()) -> None:
        """Make the slots of segments free that are not taken; those first that `take` would give first."""
        slots = {
            each: [slot for slot in range(each.geometry.num_slots) if (each.name, slot) not in taken] for each in twins
        }
        self._free[twins[0].block_bytes].extend(reversed(_by_turns(slots)))

    def _add(self, segment: Segment) -> None:
        self.segments[segment.name] = segment
        self._num_segment_bytes += segment.geometry.num_bytes

    def _opened(self, geometry: Geometry, file: int) -> Segment:
        direct = None
        if self.is_direct:
            with suppress(OSError):
                direct = self._files.open(geometry.name, direct=True)
        self._num_opened += 1
        return Segment(geometry, self._files, file, direct, self._seal, self._num_opened)

    # slots

    def take(self, size: int, num_slots: int) -> list[Slot]:
        """Take slots for blocks of a size: free ones, those of new segments, those of the least recently used entries.

        Entries that are being read stay. Returns as many as there are, in the order of their places: what is evicted
        together later is then in one stretch, however often that happens.
        """
        taken: list[Slot] = []
        evicted: list[Slot] = []
        while len(taken) < num_slots:
            if self._free[size]:
                taken.append(self._free[size].pop())
            elif not (self._grow(size) or self._reclaim(size)):
                victims = self._evict(size, num_slots - len(taken))
                if not victims:
                    break
                taken += victims
                evicted += victims
        self.clear(evicted)
        by_segment = _by_segment(taken)
        for segment, slots in by_segment.items():
            segment.num_busy += len(slots)
        return [(each, slot) for each in sorted(by_segment, key=POSITION) for slot in by_segment[each]]

    def give(self, slots: Iterable[Slot]) -> None:
        """Give slots back that were taken and hold nothing."""
        for segment, slot in slots:
            segment.num_busy -= 1
            self.free(segment, slot)

    def free(self, segment: Segment, slot: int) -> None:
        """Make a slot free that no entry holds any more."""
        self._free[segment.geometry.block_bytes].append((segment, slot))

    def retire(self, slots: Iterable[Slot]) -> None:
        """Take slots out of use that cannot be written: the next put shall try others."""
        for segment, slot in slots:
            segment.num_busy -= 1
            self.clear([(segment, slot)])

    def _grow(self, size: int) -> bool:
        """Add segments for blocks of a size, two or one, if the capacity and the file system have room."""
        room, least = self.limit - self.num_file_bytes, self._least_bytes[size]
        if room < least:
            return False
        num_bytes = min(room, max(self.limit // NUM_TWINS, min(self.limit // 4, MIN_TWINS_BYTES), least))
        sizes = [num_bytes // 2] * 2 if num_bytes // 2 >= max(least, SHARED_BYTES) else [num_bytes]
        twins = [segment for each in sizes if (segment := self._made(size, each)) is not None]
        if twins:
            self._offer(twins)
        return bool(twins)

    def _made(self, size: int, num_bytes: int) -> Segment | None:
        """Add a segment that takes at most so many bytes; None if the file system has no room for it."""
        geometry = Geometry.fitting(self._next_number, size, num_bytes)
        assert geometry is not None, "there is room for a slot"
        self._next_number = (self._next_number + 1) % MAX_SEGMENTS  # a name that failed may still be there
        try:
            segment = self._opened(geometry, self._created(geometry))
        except OSError:
            self._counts.add(num_errors=1)
            return None
        self._add(segment)
        return segment

    def _created(self, geometry: Geometry) -> int:
        file = self._files.create(geometry.name)
        try:
            self._files.allocate(file, geometry.num_bytes)
        except OSError:
            self._files.close(file)
            self._unlink(geometry)
            raise
        return file

    def _reclaim(self, size: int) -> bool:
        """Remove a segment of another size that has been used less recently than all that could be evicted of this."""
        if len(self.queues) == 1:
            return False
        others = [each for each in self.segments.values() if each.geometry.block_bytes != size and not each.num_busy]
        stalest = min(others, key=lambda segment: segment.last_use, default=None)
        oldest = next(self._evictable(size), None)
        if stalest is None or (oldest is not None and oldest.stamp <= stalest.last_use):
            return False
        self._remove(stalest)
        return True

    def _remove(self, segment: Segment) -> None:
        """Remove a segment with all it holds."""
        size = segment.geometry.block_bytes
        queue = self.queues[size]
        lost = [entry.key for entry in queue.values() if entry.segment is segment]
        for key in lost:
            del queue[key]
        self._counts.add(num_evicted=len(lost))
        self._free[size] = [slot for slot in self._free[size] if slot[0] is not segment]
        del self.segments[segment.name]
        self._num_segment_bytes -= segment.geometry.num_bytes
        self._doubtful.discard(segment)
        segment.close()
        self._unlink(segment.geometry)

    def _evict(self, size: int, num_entries: int) -> list[Slot]:
        victims = list(islice(self._evictable(size), num_entries))
        queue = self.queues[size]
        for entry in victims:
            del queue[entry.key]
        self._counts.add(num_evicted=len(victims))
        return [(entry.segment, entry.slot) for entry in victims]

    def _evictable(self, size: int) -> Iterator[Entry]:
        return (entry for entry in self.queues[size].values() if not entry.num_readers)

    def clear(self, slots: Sequence[Slot]) -> bool:
        """Say on disk that slots hold nothing, and return whether that succeeded.

        Where not, the checksum tells once something else has been written there.
        """
        num_errors = 0
        for segment, first, num_slots in _neighbours(slots):
            try:
                segment.clear(first, num_slots)
            except OSError:
                num_errors += 1
                self._doubtful.add(segment)
        self._counts.add(num_errors=num_errors)
        return not num_errors

    def mend(self) -> bool:
        """Let nothing be on disk that is not in memory, after errors as well, and return whether that succeeded.

        Files that could not be read go: nobody can tell what they hold.
        """
        num_errors = 0
        for segment in list(self._doubtful):
            queue = self.queues[segment.block_bytes]
            try:
                segment.write_all_records([entry for entry in queue.values() if entry.segment is segment])
                self._doubtful.discard(segment)
            except OSError:
                num_errors += 1
        for name in list(self._left_behind):
            try:
                with suppress(FileNotFoundError):
                    self._files.remove(name)
                del self._left_behind[name]
            except OSError:
                num_errors += 1
        self._counts.add(num_errors=num_errors)
        return not num_errors

    def sync(self, segments: Iterable[Segment]) -> list[Segment]:
        """Wait until what is in segments would survive a loss of power; returns those of which that is not known.

        Needs no lock, as `sync_names`.
        """
        failed = []
        for segment in segments:
            try:
                self._files.sync(segment.file)
            except OSError:
                failed.append(segment)
        self._counts.add(num_errors=len(failed))
        return failed

    def sync_names(self) -> bool:
        """Wait until files that were removed would stay so after a loss of power, and return whether that succeeded."""
        try:
            self._files.sync_names()
        except OSError:
            self._counts.add(num_errors=1)
            return False
        return True

    def doubt(self, segments: Iterable[Segment]) -> None:
        """Have records written again by `mend`: what a sync could not write is not written by the next one."""
        self._doubtful.update(segments)

    # entries

    def enter(self, entry: Entry) -> None:
        """Let an entry be found, as the one used last; the caller says when that was."""
        self.queues[entry.segment.block_bytes][entry.key] = entry

    def use(self, entries: Iterable[Entry], stamps: Iterable[int]) -> None:
        """Make each entry in turn the one used last; stamps grow, from call to call as well."""
        for entry, stamp in zip(entries, stamps, strict=True):
            segment = entry.segment
            self.queues[segment.block_bytes].move_to_end(entry.key)
            segment.stamps[entry.slot] = segment.last_use = stamp
            segment.has_unwritten_stamps = True

    def leave(self, entry: Entry) -> None:
        """Let an entry not be found any more."""
        del self.queues[entry.segment.geometry.block_bytes][entry.key]

    def save_order(self) -> None:
        """Write the order of use."""
        for segment in self.segments.values():
            try:
                segment.write_stamps()
            except OSError:
                self._counts.add(num_errors=1)

    def close(self) -> None:
        """Let go of all files."""
        for segment in self.segments.values():
            segment.close()


def _by_segment(slots: Iterable[Slot]) -> dict[Segment, list[int]]:
    """Slots of each segment, in order."""
    found: dict[Segment, list[int]] = {}
    for segment, slot in slots:
        found.setdefault(segment, []).append(slot)
    for each in found.values():
        each.sort()
    return found


def _by_turns(by_segment: Mapping[Segment, Sequence[int]]) -> list[Slot]:
    """Slots of segments by turns, some at a time that are written at once if they are neighbours."""
    turns = []
    for segment, slots in by_segment.items():
        step = max(1, PART_BYTES // segment.slot_bytes)
        turns.append(
            [[(segment, slot) for slot in slots[first : first + step]] for first in range(0, len(slots), step)]
        )
    return [slot for turn in zip_longest(*turns, fillvalue=()) for some in turn for slot in some]


def _neighbours(slots: Sequence[Slot]) -> Iterator[tuple[Segment, int, int]]:
    """Segment, first slot and number of each run of neighbouring slots."""
    for segment, ordered in _by_segment(slots).items():
        for begin, end in neighbours(ordered):
            yield segment, ordered[begin], end - begin
