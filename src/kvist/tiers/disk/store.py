"""The disk store: puts, gets and drops contents, from several threads, whatever the file system does meanwhile."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import Literal, NamedTuple, Self

from kvist.errors import ArgumentError, ConfigError, TransferError
from kvist.tiers.counting import Counts
from kvist.tiers.disk.directory import Directory, overhead_bytes
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.runs import Buffered, Direct, Piece
from kvist.tiers.disk.segments import Entry, Geometry
from kvist.tiers.disk.space import Space
from kvist.tiers.disk.traffic import Traffic
from kvist.tiers.envelope import Envelope
from kvist.tiers.protocol import StoreFormat, StoreStats

__all__ = ["DiskStore"]

USES_BETWEEN_SAVES = 4096
"""How many uses of entries `kill -9` may take out of the order in which they are evicted."""

NOTHING: Mapping[bytes, Entry] = {}


class Wanted(NamedTuple):
    """What is to be put: keys, and for each its contents as bytes."""

    keys: Sequence[bytes]
    contents: Sequence[memoryview]


class DiskStore:
    """Keeps contents in the files of one directory, at most `capacity_bytes` of them with all that is around them.

    The least recently used go first, and of those put or read by one call the last. What was put is there again when
    the directory is opened the next time, also after `kill -9`; after a loss of power what had reached the disk is.
    Raises `ConfigError` for a directory that is of another format, not a store, or in use by another store, and for a
    capacity that cannot hold a block of each group.

    What is damaged, gone or cannot be read is a miss, and what cannot be written is refused; `stats()` counts both. No
    call raises for such a reason but `drop`, since contents that were to be forgotten would be there again later.

    `io="direct"` leaves the page cache to others; where the file system cannot do that, `is_direct` is False. A store
    belongs to the process that opened it: in one that was forked it holds nothing.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> small = StoreFormat("a model", block_size=2, block_bytes=(4,))
    >>> with DiskStore(folder.name, 1 << 20, small) as store:
    ...     store.put([(bytes(48), memoryview(b"KKVV"))])
    1
    >>> buffer = bytearray(4)
    >>> with DiskStore(folder.name, 1 << 20, small) as store:
    ...     store.get([bytes(48)], [memoryview(buffer)]), bytes(buffer)
    ([True], b'KKVV')
    >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        format: StoreFormat,
        *,
        io: Literal["buffered", "direct"] = "buffered",
        files: Files | None = None,
    ) -> None:
        sizes, self._overhead = frozenset(format.block_bytes), overhead_bytes(format)
        _check(capacity_bytes, self._overhead, sizes, io)
        self._counts = Counts()
        self._directory = Directory(Path(directory), format, Files() if files is None else files)
        self._capacity_bytes = capacity_bytes
        limit = capacity_bytes - self._overhead
        self._space = Space(self._directory.files, limit, sizes, self._directory.seal, self._counts)
        self._space.is_direct = io == "direct" and self._directory.takes_direct()
        checksum = self._directory.checksum
        io_used = Direct(checksum) if self._space.is_direct else Buffered(checksum)
        self._traffic = Traffic(io_used, self._counts)
        self._tick = self._loaded()
        self._pending: dict[bytes, Entry] = {}
        self._changed = Condition()
        self._num_active = self._num_unsaved_uses = 0
        self._is_open = True
        self._process = os.getpid()

    def _loaded(self) -> int:
        try:
            return self._space.load()
        except BaseException:
            self._space.close()
            self._directory.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether contents go past the page cache."""
        return self._space.is_direct

    @property
    def num_file_bytes(self) -> int:
        """Bytes of all files, with what is around the contents; never more than the capacity."""
        with self._changed:
            return self._space.num_file_bytes + self._overhead

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is there, as far as one knows without reading it."""
        found = [False] * len(keys)
        if self._is_usable:
            for queue in self._space.queues.values():  # one look at a dict needs no lock
                found = [was or key in queue for was, key in zip(found, keys, strict=True)]
        return found

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep contents, evicting older ones, and return how many of these are there now.

        Where not all can be kept, the first are, and none after the first that is not: of a prefix put in order, no
        block is there without those before it. Raises `ArgumentError` for keys and lengths that are of no block.
        """
        wanted = self._checked(entries)
        num_there = 0
        with self._busy() as may:
            if may:
                held, pieces, stamps = self._reserve(wanted)
                said: dict[int, bytes] = {}
                failed: set[int] = set()
                try:
                    self._traffic.write(pieces, stamps, said, failed)
                finally:
                    num_there = self._publish(wanted, held, pieces, said, failed)
        self._counts.add(num_refused=len(wanted.keys) - num_there)
        return num_there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill one writable buffer of bytes for each key, and say of each whether it holds what was put.

        A buffer whose contents were found damaged may have been written to.
        """
        if len(keys) != len(buffers):
            raise ArgumentError(f"{len(keys)} keys, but {len(buffers)} buffers; each key needs one")
        flat = _flat(buffers)
        whole: set[int] = set()
        bad: set[int] = set()
        with self._busy() as may:
            if may:
                pieces = self._hold(keys, flat)
                try:
                    self._traffic.read(pieces, whole, bad)
                finally:
                    self._release(pieces, whole, bad)
        found = [index in whole for index in range(len(keys))]
        self._counts.add_found(found)
        return found

    def drop(self, tag: bytes) -> None:
        """Forget all contents whose keys begin with `tag`; an empty one: everything. What is being put goes as well.

        It survives a loss of power. Raises `TransferError` if it could not be written: then the contents are forgotten,
        but only until the directory is opened again, or for good once another call succeeds.
        """
        with self._busy() as may:
            if may and not self._drop(tag):
                raise TransferError(
                    f"{self._directory.path}: what was dropped could not be cleared on the disk and would be there "
                    f"again later; drop it again, or close the store and delete the directory"
                )

    def stats(self) -> StoreStats:
        """Return what is held and what was done."""
        with self._changed:
            held = {size: len(queue) for size, queue in self._space.queues.items()}
        return self._counts.stats(
            num_entries=sum(held.values()),
            num_bytes=sum(size * num_entries for size, num_entries in held.items()),
            capacity_bytes=self._capacity_bytes,
        )

    def close(self) -> None:
        """Wait for calls that are under way, write the order of use, and let go of the directory.

        Later calls find and keep nothing.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._changed.wait_for(lambda: not self._num_active)
            self._traffic.close()
            self._space.save_order()
            self._space.close()
            self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _is_usable(self) -> bool:
        return self._is_open and os.getpid() == self._process

    @contextmanager
    def _busy(self) -> Iterator[bool]:
        """Keep the store open in the meantime, and say whether it is; a fork may have left the lock taken for ever."""
        if not self._is_usable:
            yield False
            return
        with self._changed:
            may = self._is_open
            self._num_active += may
        try:
            yield may
        finally:
            with self._changed:
                self._num_active -= may
                self._changed.notify_all()

    def _checked(self, entries: Sequence[tuple[bytes, memoryview]]) -> Wanted:
        keys, contents = [key for key, _ in entries], _flat([contents for _, contents in entries])
        for key in {len(key): key for key in keys}.values():
            Envelope.check_key(key)
        unknown = {each.nbytes for each in contents}.difference(self._space.queues)
        if unknown:
            allowed = " or ".join(map(str, sorted(self._space.queues)))
            raise ArgumentError(f"contents of {min(unknown)} bytes, but blocks of this format have {allowed}")
        return Wanted(keys, contents)

    def _entries(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Entry | None]:
        """The entry of each key that has as many bytes as its buffer."""
        queues, sizes = self._space.queues, [buffer.nbytes for buffer in buffers]
        if len(set(sizes)) == 1:
            return list(map(queues.get(sizes[0], NOTHING).get, keys))
        return [queues.get(size, NOTHING).get(key) for key, size in zip(keys, sizes, strict=True)]

    # Putting: slots are reserved, contents written without the lock, and only then it is said what is in the slots.

    def _reserve(self, wanted: Wanted) -> tuple[list[Entry], list[Piece], range]:
        """Hold what is there already, and give slots to the first of the rest, as many as there are.

        Returns both, and the times that records shall tell, by place.
        """
        held: list[Entry] = []
        missing: dict[bytes, int] = {}
        with self._changed:
            for place, (key, entry) in enumerate(zip(wanted.keys, self._entries(*wanted), strict=True)):
                if entry is not None:
                    held.append(entry)
                elif key not in self._pending:
                    missing.setdefault(key, place)
            self._pin(held)
            return held, self._placed(missing, wanted.contents), self._stamps(len(wanted.keys))

    def _placed(self, missing: dict[bytes, int], contents: Sequence[memoryview]) -> list[Piece]:
        needed = Counter([contents[place].nbytes for place in missing.values()])
        slots = {size: deque(self._space.take(size, num_slots)) for size, num_slots in needed.items()}
        pieces = []
        for key, place in missing.items():
            left = slots[contents[place].nbytes]
            if not left:
                break
            segment, slot = left.popleft()
            self._pending[key] = entry = Entry(key, segment, slot)
            pieces.append(Piece(entry, contents[place], place))
        for rest in slots.values():
            self._space.give(rest)
        return pieces

    def _publish(
        self,
        wanted: Wanted,
        held: Sequence[Entry],
        pieces: Sequence[Piece],
        said: Mapping[int, bytes],
        failed: set[int],
    ) -> int:
        """Let the first pieces be found, as far as all were written, and return how many of the wanted are there."""
        with self._changed:
            unwritten = [piece.place for piece in pieces if piece.place not in said]
            end = min(unwritten, default=len(wanted.keys))
            ready = [piece for piece in pieces if piece.place < end and not piece.entry.is_dropped]
            recorded = self._traffic.record(ready, said, failed)
            self._settle(pieces, recorded, failed)
            self._unpin(held)
            there = [entry for entry in self._entries(*wanted) if entry is not None]
            self._use(there)
            self._counts.add(num_put=len(recorded))
            return len(there)

    def _settle(self, pieces: Sequence[Piece], recorded: Collection[int], failed: Collection[int]) -> None:
        for piece in pieces:
            entry, place = piece.entry, piece.place
            del self._pending[entry.key]
            if place in recorded:
                entry.segment.num_busy -= 1
                self._space.enter(entry)
            elif place in failed:
                self._space.retire([(entry.segment, entry.slot)])
            else:
                self._space.give([(entry.segment, entry.slot)])

    # Getting: entries are held, so that their slots stay theirs, and read without the lock.

    def _hold(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Piece]:
        with self._changed:
            found = zip(self._entries(keys, buffers), buffers, range(len(keys)), strict=True)
            pieces = [Piece(entry, buffer, place) for entry, buffer, place in found if entry is not None]
            self._pin([piece.entry for piece in pieces])
            return pieces

    def _release(self, pieces: Sequence[Piece], whole: Collection[int], bad: Collection[int]) -> None:
        with self._changed:
            if bad:
                self._forget([piece.entry for piece in pieces if piece.place in bad and not piece.entry.is_dropped])
            self._unpin([piece.entry for piece in pieces])
            used = [piece.entry for piece in pieces if piece.place in whole and not piece.entry.is_dropped]
            self._use(used)

    # All of these need the lock.

    def _stamps(self, num_uses: int) -> range:
        """The times of so many uses, the first the last: a prefix loses its end first."""
        self._tick += num_uses
        return range(self._tick, self._tick - num_uses, -1)

    def _use(self, entries: Sequence[Entry]) -> None:
        """Make entries the last used, the first of them the very last."""
        self._space.use(reversed(entries), reversed(self._stamps(len(entries))))
        self._num_unsaved_uses += len(entries)
        if self._num_unsaved_uses >= USES_BETWEEN_SAVES:
            self._num_unsaved_uses = 0
            self._space.save_order()

    def _pin(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.num_readers += 1
            entry.segment.num_busy += 1

    def _unpin(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.num_readers -= 1
            entry.segment.num_busy -= 1
            if entry.is_dropped and not entry.num_readers:
                self._space.free(entry.segment, entry.slot)

    def _forget(self, entries: Sequence[Entry]) -> None:
        """Let entries not be found any more, here and, if it can be written, later."""
        distinct = list({id(entry): entry for entry in entries}.values())
        for entry in distinct:
            entry.is_dropped = True
            self._space.leave(entry)
            if not entry.num_readers:
                self._space.free(entry.segment, entry.slot)
        self._space.clear([(entry.segment, entry.slot) for entry in distinct])

    def _drop(self, tag: bytes) -> bool:
        with self._changed:
            for key, entry in self._pending.items():
                entry.is_dropped |= key.startswith(tag)
            queues = self._space.queues.values()
            entries = [entry for queue in queues for key, entry in queue.items() if key.startswith(tag)]
            self._forget(entries)
            is_cleared = self._space.mend()
            segments = failed = list(self._space.segments.values())
            for segment in segments:
                segment.num_busy += 1
        try:  # also what was evicted, or removed with its file, may be there again until then
            failed = self._space.sync(segments)
            is_lasting = self._space.sync_names()
        finally:
            with self._changed:
                self._space.doubt(failed)
                for segment in segments:
                    segment.num_busy -= 1
        return is_cleared and is_lasting and not failed


def _flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The bytes of contiguous buffers."""
    return [each if each.format == "B" and each.ndim == 1 else each.cast("B") for each in buffers]


def _check(capacity_bytes: int, overhead: int, sizes: Collection[int], io: str) -> None:
    problems = []
    if io not in ("buffered", "direct"):
        problems.append(f"io is {io!r}, must be 'buffered' or 'direct'")
    if not sizes or min(sizes) < 1:
        problems.append(f"the format's block_bytes are {sorted(sizes)}, but each group needs a positive number of them")
    needed = overhead + sum(Geometry(0, size, 1).num_bytes for size in sizes)
    if capacity_bytes < needed:
        problems.append(f"capacity_bytes is {capacity_bytes}, but one block of each group takes {needed}")
    if problems:
        raise ConfigError(problems)
