"""What part of the speed of `dd` and `fio` do puts into and gets from a disk store reach, and how fast is its start?

`dd`, `fio` (psync, one job) and a loop of our own write or read one file with the same block size, call by call, and
check nothing. What the two programs say they took counts, without their start. Both have one buffer, which stays in
the processor's cache; the loop reads into and writes from as many as the store. Where one of them is missing, it says
so and the others remain; the loop has a target only where it is alone. The store is full, so that each put evicts as
many blocks; the references overwrite their file. `to disk` ends with fsync, `to cache` does not; `cold` reads after
the page cache was told to forget, `warm` from it; `direct` passes it by. All times are those on the wall, for devices
are waited for, and medians of turns; a store takes two threads where there are cores for them, the others one. So
nothing else may run on two cores meanwhile, or only behind it: `chrt -r 1 python benchmarks/bench_disk.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from kvist.tiers.disk import DiskStore
from kvist.tiers.protocol import StoreFormat
from report import AtMost, AtMostTimes, Options, Row, main

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
SEVENTY_PERCENT = AtMostTimes(1 / 0.7)
PLAIN = "plain file"
COPIED = re.compile(r"copied, ([0-9.e+-]+) s")
BATCH_BYTES = 64 * MIB
NUM_SCANNED = 100_000
SCANNED_BYTES = 4 * KIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contestant:
    """`call` is timed after `prepare`, unless it returns the seconds that count."""

    call: Callable[[], float | None]
    prepare: Callable[[], object] = lambda: None


def measure(options: Options) -> list[Row]:
    """All block sizes through the page cache and past it, then the start."""
    total, repeats = (16 * MIB, 1) if options.quick else (256 * MIB, 5)
    rows = []
    for block_bytes in BLOCK_BYTES[:1] if options.quick else BLOCK_BYTES:
        with TemporaryDirectory(dir=".") as folder:
            rows += through_the_cache(Path(folder), block_bytes, total, repeats)
        with TemporaryDirectory(dir=".") as folder:
            rows += past_the_cache(Path(folder), block_bytes, total, repeats)
    with TemporaryDirectory(dir=".") as folder:
        return rows + start(Path(folder), 1000 if options.quick else NUM_SCANNED)


def through_the_cache(folder: Path, block_bytes: int, total: int, repeats: int) -> list[Row]:
    """Puts and gets with io="buffered"."""
    with full_store(folder / "store", block_bytes, total, "buffered") as subject:
        plain = PlainFile(folder / "plain", subject)
        ours = {
            "put to disk": Contestant(partial(in_order, subject.put, subject.sync)),
            "put to cache": Contestant(subject.put, subject.sync),
            "get cold": Contestant(subject.get, subject.forget),
            "get warm": Contestant(subject.get, subject.get),
        }
        return compared(ours, plain, repeats)


def past_the_cache(folder: Path, block_bytes: int, total: int, repeats: int) -> list[Row]:
    """Puts and gets with io="direct", where the file system can do that."""
    with full_store(folder / "store", block_bytes, total, "direct") as subject:
        if not subject.store.is_direct:
            return []
        plain = PlainFile(folder / "plain", subject)
        return compared({"put direct": Contestant(subject.put), "get direct": Contestant(subject.get)}, plain, repeats)


def compared(ours: Mapping[str, Contestant], plain: PlainFile, repeats: int) -> list[Row]:
    """A row for each subject and reference, timed in turns."""
    rows = []
    for name, contestant in ours.items():
        references = {writer: plain.contestant(name, writer) for writer in available()}
        subject, *others = in_turns((contestant, *references.values()), repeats)
        for writer, seconds in zip(references, others, strict=True):
            rows.append(
                Row(
                    name=f"{name}, blocks of {plain.block_bytes // KIB} KiB",
                    value=subject / plain.total * 2**30,
                    unit="s/GiB",
                    reference=seconds / plain.total * 2**30,
                    reference_name=writer,
                    target=SEVENTY_PERCENT if writer != PLAIN or len(references) == 1 else None,
                )
            )
    return rows


@cache
def available() -> tuple[str, ...]:
    """The references that there are; says why one is not."""
    missing = [name for name in ("fio", "dd") if which(name) is None]
    for name in missing:
        print(f"{name} is not installed; its rows are left out, the others remain", file=sys.stderr)
    return (*(name for name in ("fio", "dd") if name not in missing), PLAIN)


def in_order(*calls: Callable[[], None]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


def batched(items: Sequence[T], num_items: int) -> Iterator[Sequence[T]]:
    """Cut a list into batches."""
    return (items[first : first + num_items] for first in range(0, len(items), num_items))


def pages(num_bytes: int) -> memoryview:
    """Memory as direct I/O needs it: aligned."""
    return memoryview(mmap.mmap(-1, num_bytes))


def pieces(whole: memoryview, num_bytes: int) -> list[memoryview]:
    """Cut memory into pieces."""
    return [whole[first : first + num_bytes] for first in range(0, len(whole), num_bytes)]


def in_turns(contestants: tuple[Contestant, ...], repeats: int) -> list[float]:
    """Median seconds of each, after one round that does not count."""
    samples: list[list[float]] = [[] for _ in contestants]
    for repetition in range(repeats + 1):
        for index in np.roll(range(len(contestants)), repetition).tolist():
            contestants[index].prepare()
            began = time.perf_counter()
            told = contestants[index].call()
            samples[index].append(time.perf_counter() - began if told is None else told)
    return [statistics.median(each[1:]) for each in samples]


class FullStore:
    """A store that is full of blocks; each put brings new ones, each get reads those that were put last."""

    def __init__(self, directory: Path, store: DiskStore, block_bytes: int, total: int) -> None:
        self.directory, self.store = directory, store
        self.num_blocks, self.num_batch = total // block_bytes, max(1, BATCH_BYTES // block_bytes)
        contents = pages(total)
        contents[:] = np.random.default_rng(0).bytes(total)
        self.contents = pieces(contents, block_bytes)
        self.buffers = pieces(pages(self.num_batch * block_bytes), block_bytes)
        self.first = 0

    def put(self) -> None:
        """Put new blocks, in batches."""
        self.first += self.num_blocks
        for batch in batched(list(zip(self.keys(), self.contents, strict=True)), self.num_batch):
            if self.store.put(batch) != len(batch):
                raise RuntimeError(f"blocks were refused: {self.store.stats()}")

    def get(self) -> None:
        """Get them back, in batches."""
        for batch in batched(self.keys(), self.num_batch):
            if not all(self.store.get(batch, self.buffers[: len(batch)])):
                raise RuntimeError(f"blocks were missing: {self.store.stats()}")

    def keys(self) -> list[bytes]:
        """The keys that were put last."""
        return [number.to_bytes(48, "big") for number in range(self.first, self.first + self.num_blocks)]

    def sync(self) -> None:
        """Wait for the disk."""
        for path in self.directory.glob("*.blocks"):
            sync(path)

    def forget(self) -> None:
        """Have the page cache forget."""
        for path in self.directory.glob("*.blocks"):
            forget(path)


@contextmanager
def full_store(directory: Path, block_bytes: int, total: int, io: str) -> Iterator[FullStore]:
    """A store with room for twice what is put at once, filled."""
    format = StoreFormat("measured", 16, (block_bytes,))
    with DiskStore(directory, 2 * total + total // 8, format, io=io) as store:  # type: ignore[arg-type]
        full = FullStore(directory, store, block_bytes, total)
        for _ in range(3):
            full.put()
        full.sync()
        yield full


class PlainFile:
    """One file, written and read block by block, by this process, `dd` or `fio`.

    This process takes the memory that the store's blocks use.
    """

    def __init__(self, path: Path, like: FullStore) -> None:
        self.path, self.like = path, like
        self.block_bytes, self.total = len(like.contents[0]), len(like.contents) * len(like.contents[0])
        self.path.touch()
        self.write()
        sync(path)

    def contestant(self, name: str, writer: str) -> Contestant:
        """What does the same as a subject, by the name of that."""
        acts = {"fio": self.fio, "dd": self.dd, PLAIN: self.loop}
        prepare = {"put to cache": self.sync, "get cold": self.forget, "get warm": self.read}.get(name, lambda: None)
        return Contestant(partial(acts[writer], name), prepare)

    def loop(self, name: str) -> None:
        """By this process."""
        flags = os.O_RDWR | (os.O_DIRECT if "direct" in name else 0)
        (self.write if "put" in name else self.read)(flags)
        if name == "put to disk":
            self.sync()

    def dd(self, name: str) -> float:
        """By `dd`; returns the seconds that it tells."""
        size = [f"bs={self.block_bytes}", f"count={len(self.like.contents)}"]
        if "put" in name:
            ends = ["if=/dev/zero", f"of={self.path}", "conv=notrunc" + ",fsync" * (name == "put to disk")]
        else:
            ends = [f"if={self.path}", "of=/dev/null"]
        direct = [("oflag" if "put" in name else "iflag") + "=direct"] if "direct" in name else []
        found = COPIED.search(said(["dd", *ends, *size, *direct], "stderr"))
        if found is None:
            raise RuntimeError("dd tells no time that we understand")
        return float(found[1])

    def fio(self, name: str) -> float:
        """By `fio`; returns the seconds that it tells, which are whole milliseconds."""
        way = "write" if "put" in name else "read"
        settings = {
            "name": "reference",
            "filename": self.path,
            "rw": way,
            "bs": self.block_bytes,
            "size": self.total,
            "ioengine": "psync",
            "direct": int("direct" in name),
            "end_fsync": int(name == "put to disk"),
            "invalidate": 0,
            "fadvise_hint": 0,
            "fallocate": "none",
            "gtod_reduce": 1,
            "scramble_buffers": 0,
            "output-format": "json",
        }
        told = json.loads(said(["fio", *(f"--{setting}={value}" for setting, value in settings.items())], "stdout"))
        return float(told["jobs"][0][way]["runtime"]) / 1000

    def write(self, flags: int = os.O_RDWR) -> None:
        """Overwrite it all."""
        with opened(self.path, flags) as file:
            for block in self.like.contents:
                os.write(file, block)

    def read(self, flags: int = os.O_RDWR) -> None:
        """Read it all."""
        with opened(self.path, flags) as file:
            for number in range(self.like.num_blocks):
                os.readv(file, [self.like.buffers[number % self.like.num_batch]])

    def sync(self) -> None:
        """Wait for the disk."""
        sync(self.path)

    def forget(self) -> None:
        """Have the page cache forget."""
        forget(self.path)


def said(command: Sequence[str], stream: str) -> str:
    """What a program says, which must succeed."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return str(getattr(done, stream))


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    """An open file."""
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def sync(path: Path) -> None:
    """Wait for the disk."""
    with opened(path) as file:
        os.fsync(file)


def forget(path: Path) -> None:
    """Have the page cache forget a file; only what is on disk can be."""
    with opened(path) as file:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: Path, num_blocks: int) -> list[Row]:
    """Opening a store of so many blocks, against reading the same index from SQLite and listing as many files."""
    format = StoreFormat("measured", 16, (SCANNED_BYTES,))
    capacity, contents = 2 * num_blocks * SCANNED_BYTES, memoryview(bytes(SCANNED_BYTES))
    keys = [number.to_bytes(48, "big") for number in range(num_blocks)]
    with DiskStore(folder / "store", capacity, format) as store:
        for batch in batched(keys, 256):
            store.put([(key, contents) for key in batch])

    def open_store() -> None:
        with DiskStore(folder / "store", capacity, format) as store:
            if store.stats().num_entries != num_blocks:
                raise RuntimeError(f"blocks were lost: {store.stats()}")

    def forget_store() -> None:
        for path in (folder / "store").iterdir():
            forget(path)

    contestants = (
        Contestant(open_store),
        Contestant(open_store, forget_store),
        sqlite_index(folder, keys),
        many_files(folder, keys),
    )
    warm, cold, sqlite, files = in_turns(contestants, 5)
    limit = AtMost(2, "s")
    named = f"open {num_blocks:,} blocks"
    return [
        Row(name=f"{named}, warm", value=warm, unit="s", reference=sqlite, reference_name="SQLite", target=limit),
        Row(name=f"{named}, cold", value=cold, unit="s", reference=files, reference_name="a file each", target=limit),
    ]


def sqlite_index(folder: Path, keys: list[bytes]) -> Contestant:
    """The same index as a table."""
    path = folder / "index.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE blocks (key BLOB PRIMARY KEY, slot, checksum, stamp) WITHOUT ROWID")
        rows = ((key, slot, slot << 32, slot) for slot, key in enumerate(keys))
        database.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", rows)
    database.close()

    def read() -> None:
        connection = sqlite3.connect(path)
        found = {key: (slot, checksum) for key, slot, checksum, _ in connection.execute("SELECT * FROM blocks")}
        connection.close()
        if len(found) != len(keys):
            raise RuntimeError("rows were lost")

    return Contestant(read)


def many_files(folder: Path, keys: list[bytes]) -> Contestant:
    """A file for each block, all empty here: name, length and time of use are the index."""
    (folder / "files").mkdir()
    for key in keys:
        (folder / "files" / key.hex()).touch()

    def read() -> None:
        with os.scandir(folder / "files") as entries:
            found = {bytes.fromhex(entry.name): entry.stat() for entry in entries}
        if len(found) != len(keys):
            raise RuntimeError("files were lost")

    return Contestant(read)


if __name__ == "__main__":
    main("disk", measure, __doc__)
