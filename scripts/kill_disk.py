"""Kill a process with SIGKILL while it writes to a disk store, open the directory again, and look at every byte.

    python scripts/kill_disk.py --kills 200 --seed 1

After each kill the store must come up, serve no wrong byte, and have all that the process had been told is kept, unless
it was evicted since. Exits 1 at the first that is not so. Every other process writes past the page cache.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import shake_128
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from kvist.tiers.disk import DiskStore
from kvist.tiers.protocol import StoreFormat, StoreStats

FORMAT = StoreFormat("killed", block_size=16, block_bytes=(16_384, 50_000))
CAPACITY_BYTES = 40 << 20
NUM_SAFE = 16
"""So many of the last entries cannot have been evicted before the next ones are told to be kept."""

BATCH = 4
IO: tuple[Literal["buffered", "direct"], ...] = ("buffered", "direct")


def key(number: int) -> bytes:
    """The key of an entry."""
    return number.to_bytes(48, "big")


def contents(number: int) -> bytes:
    """The contents of an entry: one of the two sizes, different in every byte from those of others."""
    return shake_128(key(number)).digest(FORMAT.block_bytes[number // BATCH % 2])


def write(directory: str, first: int, io: Literal["buffered", "direct"]) -> None:
    """Put entries for ever, and say after each batch which is the last; read and drop some."""
    with DiskStore(directory, CAPACITY_BYTES, FORMAT, io=io) as store:
        print("opened", flush=True)
        for start in range(first, sys.maxsize, BATCH):
            entries = [(key(number), memoryview(contents(number))) for number in range(start, start + BATCH)]
            if store.put(entries) == BATCH:
                print(start + BATCH - 1, flush=True)
            store.drop(key(max(0, start - 300)))
            wrong = [number for number in range(max(0, start - 40), start) if not is_right(store, number)]
            if wrong:
                raise SystemExit(f"wrong contents of {wrong}")


def is_right(store: DiskStore, number: int) -> bool:
    """Whether what a store says of an entry is a miss or the truth."""
    buffer = bytearray(len(contents(number)))
    return not store.get([key(number)], [memoryview(buffer)])[0] or buffer == contents(number)


def kill(directory: str, first: int, io: str, delay_s: float) -> list[int]:
    """Let a process write for a moment, kill it, and return the numbers that it said are kept."""
    command = [sys.executable, __file__, "--write", directory, "--first", str(first), "--io", io]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        opened = process.stdout.readline()
        time.sleep(delay_s)
        code = process.poll()
        process.kill()
        told = process.stdout.read().splitlines(keepends=True)
    if opened != "opened\n" or code is not None:
        raise SystemExit(f"the writer came to its end by itself: {opened!r}, code {code}")
    return [int(line) for line in told if line.endswith("\n")]


def inspect(directory: str, lasts: Sequence[int]) -> tuple[StoreStats, int]:
    """Open what was left; returns its numbers and how many entries were read. Exits where something is wrong."""
    with DiskStore(directory, CAPACITY_BYTES, FORMAT) as store:
        last = max(lasts, default=-1)
        numbers = range(max(0, last - 2000), last + 2 * BATCH)
        there = [number for number in numbers if store.contains([key(number)])[0]]
        wrong = [number for number in there if not is_right(store, number)]
        kept = {number for end in lasts for number in range(end - BATCH + 1, end + 1) if number > last - NUM_SAFE}
        lost = sorted(kept - set(there))
        stats = store.stats()
    num_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
    if wrong or lost or num_bytes > CAPACITY_BYTES:
        raise SystemExit(f"wrong: {wrong}; lost: {lost}; {num_bytes} bytes of {CAPACITY_BYTES}")
    return stats, len(there)


def rounds(num_kills: int, seed: int, directory: str) -> Iterator[tuple[StoreStats, int, int]]:
    """Kill so often, and give after each what the store says, how many entries were read, and how many told."""
    chance, first = random.Random(seed), 0
    for io in islice(cycle(IO), num_kills):
        lasts = kill(directory, first, io, chance.uniform(0, 0.25))
        stats, num_read = inspect(directory, lasts)
        yield stats, num_read, len(lasts) * BATCH
        first = max(lasts, default=first - 1) + 1 + 2 * BATCH


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, look, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--write", metavar="DIRECTORY", help="be the process that is killed")
    parser.add_argument("--first", type=int, default=0, help="number of its first entry")
    parser.add_argument("--io", choices=IO, default=IO[0], help="how it writes")
    options = parser.parse_args(arguments)
    if options.write:
        write(options.write, options.first, options.io)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    with TemporaryDirectory() as directory:
        seen = list(rounds(options.kills, seed, directory))
    num_told, num_read = sum(told for _, _, told in seen), sum(read for _, read, _ in seen)
    num_torn = sum(stats.num_corrupt for stats, _, _ in seen)
    print(
        f"seed {seed}: {options.kills} kills, {num_told} entries told to be kept, {num_read} read after restarts: "
        f"0 wrong, 0 lost, {num_torn} found torn by their checksum"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
