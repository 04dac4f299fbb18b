"""Small stores on disk, and contents that tell whose they are."""

import os
from pathlib import Path
from random import Random

from kvist.tiers.disk import DiskStore
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.segments import Geometry
from kvist.tiers.protocol import StoreFormat

TINY = StoreFormat("a model", block_size=2, block_bytes=(100,))
PAIR = StoreFormat("a model", block_size=2, block_bytes=(100, 5000))
PAGES = StoreFormat("a model", block_size=2, block_bytes=(4096,))


def room(num_blocks, size=100):
    """The capacity that one size of blocks needs for so many of them, when each is in a segment of its own."""
    return 8192 + num_blocks * Geometry(0, size, 1).num_bytes


def key(number, tag=0):
    return bytes([tag]) * 16 + number.to_bytes(32, "big")


def contents(number, size=100):
    return Random(number).randbytes(size)


def entry(number, size=100, tag=0):
    return key(number, tag), memoryview(contents(number, size))


def put(store, *numbers, size=100, tag=0):
    return store.put([entry(number, size, tag) for number in numbers])


def found(store, *numbers, size=100, tag=0):
    """Of which numbers the contents are there; they must be the right ones."""
    buffers = [bytearray(size) for _ in numbers]
    answers = store.get([key(number, tag) for number in numbers], [memoryview(buffer) for buffer in buffers])
    there = [number for number, answer in zip(numbers, answers, strict=True) if answer]
    for number, answer, buffer in zip(numbers, answers, buffers, strict=True):
        assert not answer or buffer == contents(number, size), f"wrong contents of {number}"
    return there


class UnsyncedFiles(Files):
    """Files as they are, only that nothing waits for the disk."""

    def sync(self, file):
        pass

    def sync_names(self):
        pass


def opened(directory, capacity=1 << 20, format=TINY, *, files=None, **options):
    return DiskStore(directory, capacity, format, files=files or UnsyncedFiles(), **options)


def segments(directory):
    return sorted(Path(directory).glob("*.blocks"))


def num_bytes(directory):
    """Bytes of all files, as the capacity counts them."""
    return sum(os.lstat(path).st_size for path in Path(directory).iterdir())
